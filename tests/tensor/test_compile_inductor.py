"""torch.compile with its default backend, Inductor, which writes C++: values and gradients within 1e-6 of eager."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from meshes import MLP, Block, on_mesh
from test_compile_programs import BLOCK_PLAN, PLAN, run, spread, values

from phalanx.tensor import Replicate, Shard
from phalanx.tensor.parallel import parallelize_module
from torch_settings import in_all_threads, recompile_limit

pytestmark = [
    pytest.mark.soak,  # compiling takes half a minute; with aot_eager the same program is compiled in every run
    pytest.mark.timeout(580),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Inductor's own imports
]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own for what is built, no pool of compiling processes, which would outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with in_all_threads(torch._inductor.config, "compile_threads", 1), recompile_limit(64):
        yield
    torch._dynamo.reset()


def check(model: Any, inputs: list[Any], *, by_largest: bool = False) -> None:
    """``by_largest``: 1e-6 of a tensor's largest value. Inductor sums a softmax in another order than eager, on plain
    tensors too, so that small elements among large ones differ by more than 1e-6 of their own."""
    held = list(model.parameters())
    expected, sent = run(model, inputs, held)
    found, also_sent = run(torch.compile(model, fullgraph=True), inputs, held)
    assert also_sent == sent
    for one, other in zip(found, expected, strict=True):
        atol = 1e-6 * max(1.0, float(other.abs().max())) if by_largest else 1e-6
        torch.testing.assert_close(one, other, rtol=1e-6, atol=atol)


def test_tensor_parallel_models_are_within_1e6_of_eager() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        for width in (10, 9, 1):  # even, uneven, and a rank that holds nothing
            check(parallelize_module(MLP(6, width), mesh, PLAN), [values(3, 6).requires_grad_()])
        check(parallelize_module(Block(8, 2), mesh, BLOCK_PLAN), [values(3, 4, 8).requires_grad_()], by_largest=True)

    on_mesh(body, 2, timeout=500.0)


def test_a_model_on_both_axes_of_a_mesh_is_within_1e6_of_eager() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        model = parallelize_module(MLP(6, 10), mesh["tp"], PLAN)
        check(model, [values(4, 6).requires_grad_()])
        weight = spread(mesh, values(6, 4), Shard(0), Shard(1))
        x = spread(mesh, values(4, 6), Replicate(), Replicate())
        program = lambda x, weight: (x @ weight).relu().sum(0)  # noqa: E731
        expected, sent = run(program, [x, weight], [])
        found, also_sent = run(torch.compile(program, fullgraph=True), [x, weight], [])
        assert also_sent == sent
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)

    on_mesh(body, 2, 2, timeout=500.0)


def test_its_entry_point_is_wrapped_and_graphs_that_send_are_not_kept_on_the_disk(tmp_path: Path) -> None:
    """A graph names a step by its number in this process: one that another process stored would name another."""
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx

    assert hasattr(compile_fx.compile_fx, "_phalanx")

    def body(mesh: Any) -> None:
        check(parallelize_module(MLP(6, 10), mesh, PLAN), [values(3, 6).requires_grad_()])

    counters.clear()
    on_mesh(body, 2, timeout=500.0)
    found = counters["inductor"]
    assert found["fxgraph_cache_bypass"] > 0, dict(found)
    assert found["fxgraph_cache_hit"] == found["fxgraph_cache_miss"] == 0, dict(found)
