"""Training under mixed layouts gives the losses of one device, on meshes of many shapes, and does not grow."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from meshes import MLP, Block, on_mesh
from torch import Tensor, nn

from phalanx.tensor import DTensor, Replicate, Shard, StridedShard, distribute_module, distribute_tensor
from phalanx.tensor._dispatch import _cache

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3)]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(4 * 2 * 2, 5)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.avg_pool2d(F.relu(self.second(x)), 2)
        return self.head(x.flatten(1))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 11))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (lambda: MLP(6, 10), lambda: (torch.randn(7, 6), torch.randint(0, 6, (7,)))),
    "conv": (ConvNet, lambda: (torch.randn(5, 3, 8, 8), torch.randint(0, 5, (5,)))),
    "transformer": (transformer, lambda: (torch.randint(0, 11, (5, 6)), torch.randint(0, 11, (5, 6)))),
}


def mixed_placements(name: str, parameter: Tensor, num_axes: int) -> list[Any]:
    """Some layout for each parameter: a function of its name, so that neighbours differ and runs agree."""
    kinds = [Replicate(), *(Shard(d) for d in range(parameter.dim()))]
    seed = sum(map(ord, name))
    return [kinds[(seed + 3 * axis) % len(kinds)] for axis in range(num_axes)]


def spread(module: nn.Module, mesh: Any, plan: Callable[[str, Tensor, int], list[Any]]) -> nn.Module:
    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        for key, p in list(part._parameters.items()):
            if p is not None:
                placed = distribute_tensor(p.detach(), mesh, plan(f"{name}.{key}", p, mesh.ndim))
                part.register_parameter(key, nn.Parameter(placed))

    return distribute_module(module, mesh, partition)


def losses(model: nn.Module, x: Any, y: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("kind", list(MODELS))
def test_losses_are_those_of_one_device(kind: str, shape: tuple[int, ...]) -> None:
    """Uneven batches, parameters under mixed layouts, the batch cut by the first axis."""
    torch.manual_seed(0)
    make, data = MODELS[kind]
    model = make()
    x, y = data()
    expected = losses(copy.deepcopy(model), x, y, steps=3)
    assert expected[-1] < expected[0]

    def body(mesh: Any) -> list[float]:
        mine = spread(copy.deepcopy(model), mesh, mixed_placements)
        cut = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
        return losses(mine, distribute_tensor(x, mesh, cut), distribute_tensor(y, mesh, cut), steps=3)

    for found in on_mesh(body, *shape):
        assert found == pytest.approx(expected, rel=1e-4)


def fsdp_and_tp(name: str, parameter: Tensor, num_axes: int) -> list[Any]:
    """Rows cut by tp first and by fsdp second, on one dim: what a strided shard says."""
    return [StridedShard(0, split_factor=2), Shard(0)]


def test_training_where_fsdp_and_tensor_parallel_meet() -> None:
    torch.manual_seed(0)
    model, x, y = MLP(6, 9), torch.randn(4, 6), torch.randint(0, 6, (4,))
    expected = losses(copy.deepcopy(model), x, y, steps=3)

    def body(mesh: Any) -> list[float]:
        mine = spread(copy.deepcopy(model), mesh, fsdp_and_tp)
        for parameter, original in zip(mine.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), original)
        return losses(mine, distribute_tensor(x, mesh), distribute_tensor(y, mesh), steps=3)

    for found in on_mesh(body, 2, 2):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rows", [8, 7, 5, 2])
def test_strided_shards_are_tensor_parallel_first(rows: int) -> None:
    """The layout of FSDP over TP: cut by tp, then each part by fsdp; and back, both ways, uneven too."""
    value = torch.arange(rows * 3.0).view(rows, 3)

    def body(mesh: Any) -> None:
        mine = distribute_tensor(value, mesh, [StridedShard(0, split_factor=2), Shard(0)])
        after_tp = torch.chunk(value, 2)[mesh.get_local_rank("tp")] if rows > 1 else value
        expected = torch.tensor_split(after_tp, _starts(after_tp.shape[0]))[mesh.get_local_rank("dp")]
        torch.testing.assert_close(mine.to_local(), expected)
        torch.testing.assert_close(mine.full_tensor(), value)
        for other in ([Shard(0), Shard(0)], [Shard(1), Replicate()], [Replicate(), Shard(0)]):
            there = mine.redistribute(placements=other)
            torch.testing.assert_close(there.full_tensor(), value)
            back = there.redistribute(placements=mine.placements)
            torch.testing.assert_close(back.to_local(), mine.to_local())

    on_mesh(body, 2, 2)


def _starts(length: int) -> list[int]:
    """Where the second of two chunks begins."""
    return [-(-length // 2)]


def grow(steps: int, settle: int, stretches: int = 1) -> Any:
    """Resident bytes, cached decisions and live DTensors before ``steps`` steps on two ranks and after each stretch."""

    def body(mesh: Any) -> Any:
        torch.manual_seed(0)
        model = spread(MLP(32, 64), mesh, mixed_placements)
        x = distribute_tensor(torch.randn(16, 32), mesh, [Shard(0)])
        y = distribute_tensor(torch.randint(0, 32, (16,)), mesh, [Shard(0)])
        measure = _measured if mesh.get_rank() == 0 else tuple  # one rank looks, at the whole process
        measure()  # counting takes megabytes of its own, which the process keeps
        losses(model, x, y, steps=settle)  # caches fill, allocators find their size
        marks = [measure()]
        for _ in range(stretches):
            losses(model, x, y, steps=steps // stretches)
            marks.append(measure())
        return marks

    return on_mesh(body, 2, timeout=300.0)[0]


def _measured() -> tuple[int, int, int]:
    gc.collect()
    live = sum(type(o) is DTensor for o in gc.get_objects())
    return psutil.Process().memory_info().rss, len(_cache), live


def test_a_hundred_steps_leave_nothing_behind() -> None:
    (_, decisions, tensors), (_, more_decisions, more_tensors) = grow(100, settle=20)
    assert more_decisions == decisions
    assert more_tensors <= tensors + 8  # the other rank may be in the middle of a step


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_thousand_steps_do_not_grow() -> None:
    """A leak grows in every stretch of steps; an allocator that takes another arena for a thread does so in one."""
    marks = grow(1000, settle=400, stretches=5)
    memory, decisions, tensors = zip(*marks, strict=True)
    assert len(set(decisions)) == 1
    assert tensors[-1] <= tensors[0] + 8
    growth = [after - before for before, after in itertools.pairwise(memory)]
    assert min(growth) < 200_000, f"more bytes after every 200 steps: {growth}"
