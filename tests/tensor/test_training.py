"""Training under mixed layouts gives the losses of one device, on meshes of many shapes, and does not grow."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.nn.functional as F
from meshes import MLP, Block, on_mesh
from torch import Tensor, nn

from phalanx import comm
from phalanx.tensor import Replicate, Shard, StridedShard, distribute_module, distribute_tensor
from phalanx.tensor.dispatch._run import _cache
from processes import run_processes

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


class Mark(NamedTuple):
    """What the whole process holds while every rank waits."""

    resident: int
    traced: int  # by Python's own objects
    decisions: int
    tensors: int


def grow(steps: int, settle: int, stretches: int) -> list[Mark]:
    """Marks after ``settle`` steps on two ranks and after each of the following stretches of steps.

    Batches of five sizes take turns, so that layouts are even, uneven and empty.
    """

    def body(mesh: Any) -> list[Mark]:
        torch.manual_seed(0)
        model = spread(MLP(256, 512), mesh, mixed_placements)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = torch.randn(64, 256), torch.randint(0, 256, (64,))
        batches = [
            (distribute_tensor(x[:n], mesh, [Shard(0)]), distribute_tensor(y[:n], mesh, [Shard(0)]))
            for n in (64, 63, 32, 2, 1)
        ]

        def run(count: int) -> None:
            for number in range(count):
                inputs, target = batches[number % len(batches)]
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        run(settle)  # caches fill, allocators find their size
        marks = [measured(mesh.get_group())]
        for _ in range(stretches):
            run(steps // stretches)
            marks.append(measured(mesh.get_group()))
        return marks

    tracemalloc.start()
    try:
        return on_mesh(body, 2, timeout=600.0)[0]  # type: ignore[no-any-return]  # the body's own
    finally:
        tracemalloc.stop()


def measured(group: comm.Group) -> Mark:
    """One rank looks while the others wait for it: nobody is in the middle of a step."""
    group.barrier()
    mark = Mark(0, 0, 0, 0)
    if group.rank == 0:
        gc.collect()
        tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())  # isinstance asks objects to answer
        traced = tracemalloc.get_traced_memory()[0]
        mark = Mark(psutil.Process().memory_info().rss, traced, len(_cache), tensors)
    group.barrier()
    return mark


def assert_flat(marks: list[Mark], steps: int) -> None:
    """No more tensors and decisions than before; of other objects forty thousand bytes, in which the interpreter's own
    caches find their size (up to twenty thousand were seen), and fifty for each step.

    A leak grows in every stretch, so the calmest one counts: a table that is made larger once is no leak.
    """
    first = marks[0]
    assert {mark.decisions for mark in marks} == {first.decisions}
    assert {mark.tensors for mark in marks} == {first.tensors}, f"tensors: {[mark.tensors for mark in marks]}"
    grown = [after.traced - before.traced for before, after in pairwise(marks)]
    assert min(grown) < (40_000 + 50 * steps) / len(grown), grown


def grow_alone(*numbers: int, leaking: bool = False) -> list[Mark]:
    """``grow`` in a process of its own, where no other test leaves anything to be freed or counted."""
    (outcome,) = run_processes(1, grow_in_worker, numbers, leaking, timeout=600.0)
    return [Mark(*mark) for mark in outcome.value]


def grow_in_worker(worker: Any, numbers: tuple[int, int, int], leaking: bool) -> list[tuple[int, ...]]:
    torch.set_num_threads(1)
    if leaking:
        nn.utils.clip_grad_norm_ = keep_some(nn.utils.clip_grad_norm_)
    return [tuple(mark) for mark in grow(*numbers)]


def keep_some(clip: Any) -> Any:
    """``clip``, which keeps one of its results in every tenth step of two ranks."""
    kept: list[Any] = []

    def leaking(parameters: Any, limit: float) -> Any:
        norm = clip(parameters, limit)
        kept.append(norm * 1 if len(kept) % 20 == 0 else None)
        return norm

    return leaking


@pytest.mark.timeout(300)
def test_a_hundred_steps_leave_nothing_behind() -> None:
    assert_flat(grow_alone(100, 100, 2), 100)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_steps_do_not_grow() -> None:
    """An activation of the largest batch has 64 KB: one kept in eight steps would be the eight megabytes."""
    marks = grow_alone(1000, 200, 10)
    assert_flat(marks, 1000)
    resident = [mark.resident - marks[0].resident for mark in marks]
    assert resident[-1] < 8_000_000, f"resident bytes after each hundred steps: {resident}"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_leak_would_be_seen() -> None:
    """Irregular growth too: something kept in every tenth step."""
    marks = grow_alone(40, 20, 2, leaking=True)
    with pytest.raises(AssertionError, match="tensors"):
        assert_flat(marks, 40)
