"""Which unit is gathered while which computes: the next one, from the second pass on, as it came in the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp.models import batch, build
from fsdp.ranks import on_ranks, shard
from phalanx.fsdp import FSDPModule, fully_shard
from phalanx.fsdp.unit._unit import UnitState


def watched(model: Any) -> list[str]:
    """Return the list that each module which begins to compute will write itself to, with what is under way then."""
    events: list[str] = []
    units = {p or "root": m._get_fsdp_state().unit for p, m in model.named_modules() if isinstance(m, FSDPModule)}

    def note(what: str, path: str) -> None:
        coming = [name for name, unit in units.items() if unit and unit.state is UnitState.ON_ITS_WAY]
        events.append(f"{what} {path}" + (f", {' and '.join(coming)} coming" if coming else ""))

    for path, module in model.named_modules():
        if isinstance(module, FSDPModule) and path:
            inner = next(m for m in module.modules() if m is not module)
            inner.register_forward_pre_hook(lambda m, args, path=path: note("forward", path))
            inner.register_full_backward_pre_hook(lambda m, grad, path=path: note("backward", path))
    return events


def layers(*numbers: int) -> list[str]:
    return [f"layers.{n}" for n in numbers]


def test_the_next_unit_is_gathered_while_this_one_computes():
    def body(mesh):
        model = shard(build("transformer"), mesh)
        events = watched(model)
        seen = []
        for _ in range(3):
            model(batch(0)).pow(2).mean().backward()
            seen.append(list(events))
            events.clear()
        return seen

    forward = [f"forward {name}" for name in layers(0, 1, 2, 3)]
    early = [f"forward layers.{n}, layers.{n + 1} coming" for n in range(3)] + ["forward layers.3"]
    backward = [f"backward layers.{n}, layers.{n - 1} coming" for n in (3, 2, 1)] + ["backward layers.0"]
    for first, second, third in on_ranks(body, 2):
        assert first == forward + backward
        assert second == early + backward
        assert third == second


class Skipping(nn.Module):
    """Runs the layers that it is told to; the number of steps decides, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(4))
        self.chosen: list[int] = []

    def forward(self, x: Any) -> Any:
        for n in self.chosen:
            x = self.layers[n](x)
        return x

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


WAYS = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3], [3, 2, 1, 0], [1, 1, 1], [1, 1, 1], [0], [0, 1, 2, 3]]


@pytest.mark.parametrize("grad", [True, False])
def test_a_pass_that_goes_another_way_is_right_and_leaves_nothing(grad):
    def body(mesh):
        model = shard(Skipping(), mesh)
        events = watched(model)
        for way in WAYS:
            plain_way, model.chosen = Skipping(), way
            plain_way.chosen = way
            with torch.set_grad_enabled(grad):
                found, expected = (m(batch(0).requires_grad_()) for m in (model, plain_way))
            torch.testing.assert_close(found, expected)
            for block in model.layers:
                assert block._get_fsdp_state().unit.state is UnitState.SHARDED, way
            if grad:
                found.sum().backward()
                expected.sum().backward()
                for one, other in zip(model.parameters(), plain_way.parameters(), strict=True):
                    assert (one.grad is None) == (other.grad is None)
                    if one.grad is not None:
                        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
                model.zero_grad()
        return [event for event in events if event.startswith("forward")]

    forward = on_ranks(body, 2)[0]
    lengths = iter(forward)
    by_way = [[next(lengths) for _ in way] for way in WAYS]
    assert by_way[1][0] == "forward layers.0, layers.1 coming", "it was next the last time"
    assert by_way[1][1] == "forward layers.2, layers.1 coming", "and stays until the pass ends"
    assert by_way[2] == ["forward layers.0, layers.2 coming", "forward layers.2, layers.3 coming", "forward layers.3"]


def test_what_users_named_is_gathered_instead():
    def body(mesh):
        model = shard(build("transformer"), mesh)
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
        events = watched(model)
        for _ in range(2):
            events.clear()
            with torch.no_grad():
                model(batch(0))
        return events[:2]

    expected = ["forward layers.0, layers.1 and layers.2 coming", "forward layers.1, layers.2 coming"]
    assert on_ranks(body, 2) == [expected] * 2


def test_what_was_asked_for_by_hand_is_not_dropped():
    def body(mesh):
        one, other = (fully_shard(nn.Linear(6, 6), mesh=mesh) for _ in range(2))
        model = nn.ModuleList([one, other])
        handle = model[1].unshard(async_op=True)
        one(batch(0)).sum().backward()
        handle.wait()
        assert other.weight.shape == (6, 6)
        assert not hasattr(other.weight, "placements")

    on_ranks(body, 2)
