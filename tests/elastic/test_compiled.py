"""A compiled model in an elastic job: a kill and a replacement leave the bits of that compiled model undisturbed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from scripted_world import Die, World
from test_regroup import die_at

from torch_settings import recompile_limit

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=False)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with recompile_limit(64):
        yield
    torch._dynamo.reset()


def test_a_kill_and_a_replacement_leave_the_bits_of_an_undisturbed_run(tmp_path, monkeypatch) -> None:
    lone = World(tmp_path / "lone", monkeypatch)
    lone.prepare = compiled
    lone.agree(0, "a")
    lone.start("a")
    undisturbed = lone.join()["a"]
    assert isinstance(undisturbed, str), undisturbed
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "something was compiled"

    world = World(tmp_path / "world", monkeypatch)
    world.prepare = compiled
    world.agree(0, "a", "b", "c")
    back_at_work = threading.Event()

    def watch(job, step) -> None:
        if step.number == 7:
            back_at_work.set()

    def heal() -> None:
        world.break_(0, "b")
        world.agree(1, "a", "d", "c")

    world.start("a", on_step=watch)
    world.start("b", on_step=die_at(5, heal))
    world.start("c")
    assert back_at_work.wait(200), "survivors go on"
    world.start("d", 1)
    results = world.join()
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"] == undisturbed
    assert results["d"] == undisturbed or isinstance(results["d"], SystemExit), "it joined, or came after the end"
