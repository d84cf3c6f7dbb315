"""Any layout to any layout: equals gather-then-slice, forward and backward, and sends the bytes the plan promised."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from phalanx import comm
from phalanx.comm import init_device_mesh, observe
from phalanx.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._plan import plan_redistribute

COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
}


def contribution(whole: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    """``whole`` laid out so; partial axes hold unequal contributions."""
    plain = tuple(Replicate() if p.is_partial() else p for p in placements)
    local = distribute_tensor(whole, mesh, plain, src_data_rank=None)._local.clone()
    for axis, p in enumerate(placements):
        size, own = mesh.shape[axis], mesh.get_local_rank(axis)
        if p.is_partial("sum"):
            local = local - 0.5 * (size - 1) if own == 0 else torch.full_like(local, 0.5)
        elif p.is_partial("avg"):
            local = local + (own - (size - 1) / 2)
        elif p.is_partial("max"):
            local = local - own
    return DTensor.from_local(local, mesh, placements, shape=whole.shape).detach()


def check(mesh_shape: tuple[int, ...], shape: tuple[int, ...], before: Any, after: Any) -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = torch.arange(float(math.prod(shape))).reshape(shape)
        x = contribution(whole, mesh, before).requires_grad_()
        plan = x.plan(after)
        events: list[Any] = []
        with observe(lambda e: events.append(e) if e.name in COLLECTIVES else None):
            y = x.redistribute(placements=after)
        assert sum(e.nbytes for e in events) == plan.nbytes, plan
        assert y.placements == plan.target.placements
        torch.testing.assert_close(y.full_tensor(), whole)
        if not any(p.is_partial() for p in after):
            torch.testing.assert_close(
                y.to_local(), distribute_tensor(whole, mesh, after, src_data_rank=None).to_local()
            )
        # the gradient of <y, w> is w, whatever the way it took
        weights = torch.arange(float(math.prod(shape))).reshape(shape) + 1
        (y * distribute_tensor(weights, mesh, src_data_rank=None)).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), weights)

    comm.simulate(math.prod(mesh_shape)).run(rank_main)


def placements_of(ndim: int, axes: int) -> list[tuple[Placement, ...]]:
    options: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim)), Partial("sum")]
    return list(itertools.product(options, repeat=axes))


@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_every_pair_of_layouts_on_one_axis(size: int, shape: tuple[int, ...]) -> None:
    for before, after in itertools.product(placements_of(2, 1), repeat=2):
        check((size,), shape, before, after)


def test_0d_and_empty_tensors() -> None:
    check((2,), (), (Partial("sum"),), (Replicate(),))
    check((2,), (), (Replicate(),), (Partial("sum"),))
    check((2,), (0, 3), (Shard(0),), (Shard(1),))
    check((3,), (2, 2), (Shard(0),), (Replicate(),))


def test_one_collective_where_one_is_enough() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        kinds = {}
        for before, after in itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=2):
            source = Spec.of(mesh, (before,), (4, 4), torch.float32)
            plan = plan_redistribute(source, source.with_placements((after,)))
            kinds[f"{before!r}->{after!r}"] = [step.kind for step in plan.steps]
        assert kinds["S(0)->R"] == ["all_gather"]
        assert kinds["S(0)->S(1)"] == ["all_to_all"]
        assert kinds["P(sum)->R"] == ["all_reduce"]
        assert kinds["P(sum)->S(0)"] == ["reduce_scatter"]
        assert kinds["R->S(0)"] == ["slice"]
        assert kinds["R->P(sum)"] == ["split"]
        assert kinds["R->R"] == []

    comm.simulate(2).run(rank_main)


def test_plans_are_found_by_cost() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        source = Spec.of(mesh, (Shard(0), Partial()), (64, 64), torch.float32)
        plan = plan_redistribute(source, source.with_placements((Replicate(), Shard(1))))
        assert [s.kind for s in plan.steps] == ["reduce_scatter", "all_gather"], (
            "scatter first: half the bytes to gather"
        )
        assert "reduce_scatter" in repr(plan)
        nested = Spec.of(mesh, (Shard(0), Shard(0)), (64, 64), torch.float32)
        swapped = plan_redistribute(nested, nested.with_placements((Replicate(), Shard(0))))
        assert swapped.target.placements == (Replicate(), Shard(0))

    comm.simulate(4).run(rank_main)


def test_partial_max_has_no_gradient_but_reduces() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (3,))
        x = contribution(torch.arange(4.0), mesh, (Partial("max"),))
        torch.testing.assert_close(x.full_tensor(), torch.arange(4.0))
        with pytest.raises(RuntimeError, match="cannot be reduced where a gradient is needed"):
            x.requires_grad_().redistribute(placements=[Replicate()])

    comm.simulate(3).run(rank_main)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("op", ["product", "min", "max"])
def test_partial_products_and_extremes_are_taken_over_the_ranks(op: str, mesh_shape: tuple[int, ...]) -> None:
    ranks = math.prod(mesh_shape)
    parts = torch.stack([torch.arange(12.0).roll(5 * n).view(4, 3) - 4 for n in range(ranks)])
    reduce = {"product": torch.prod, "min": torch.amin, "max": torch.amax}[op]
    expected = reduce(parts, dim=0)

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        x = DTensor.from_local(parts[group.rank], mesh, [Partial(op)] * mesh.ndim)
        torch.testing.assert_close(x.full_tensor(), expected)
        for after in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim):
            found = x.redistribute(placements=after)
            reference = distribute_tensor(expected, mesh, after, src_data_rank=None)
            torch.testing.assert_close(found.to_local(), reference.to_local(), msg=f"{after}")

    comm.simulate(ranks).run(rank_main)


MOVES = [
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),  # moves nothing, rounds as the others do
    (Replicate(), Shard(0)),
    (Replicate(), Partial()),
    (Partial(), Shard(0)),
    (Partial("avg"), Replicate()),
]
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("async_op", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("before", "after"), MOVES, ids=str)
def test_each_way_has_its_dtype(before: Any, after: Any, ranks: int, async_op: bool) -> None:
    """Values, bytes and the gradient of the gradient."""
    whole = torch.arange(36.0, dtype=F64).view(6, 6)
    fine = torch.linspace(1, 2, 36, dtype=F64).view(6, 6)  # each dtype rounds it to other values

    def check_move(mesh: Any, forward: torch.dtype | None, backward: torch.dtype | None) -> None:
        x = contribution(whole, mesh, (before,)).requires_grad_()
        y = x.redistribute(placements=[after], async_op=async_op, forward_dtype=forward, backward_dtype=backward)
        there = forward or F64
        back = backward or there
        assert y.dtype == there
        assert torch.equal(y.full_tensor(), whole.to(there))
        layout = y._spec.cotangent
        given = distribute_tensor(fine.to(there), mesh, layout.placements, src_data_rank=None)
        events: list[Any] = []
        with observe(lambda e: events.append(e) if e.name in COLLECTIVES else None):
            (found,) = torch.autograd.grad(y, x, given.requires_grad_(), create_graph=True)
        assert found.dtype == F64
        assert torch.equal(found.full_tensor(), fine.to(there).to(back).to(F64))
        in_f64 = plan_redistribute(layout.with_dtype(F64), x._spec.cotangent).nbytes
        assert sum(e.nbytes for e in events) * F64.itemsize == in_f64 * back.itemsize
        direction = distribute_tensor(fine, mesh, found.placements, src_data_rank=None)
        (second,) = torch.autograd.grad(found, given, direction)
        assert torch.equal(second.full_tensor(), fine.to(back).to(there))

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        for forward, backward in [(None, None), (None, BF16), (F32, F64), (BF16, F32), (BF16, None)]:
            check_move(mesh, forward, backward)

    comm.simulate(ranks).run(rank_main)


def test_a_dtype_alone_moves_nothing_and_whole_numbers_have_no_gradient() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = contribution(torch.arange(4.0), mesh, (Shard(0),)).requires_grad_()
        y = x.redistribute(placements=[Shard(0)], forward_dtype=BF16)
        assert (y.dtype, y.placements) == (BF16, x.placements)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.full_tensor(), torch.ones(4))
        whole = contribution(torch.arange(4.0), mesh, (Partial("max"),)).requires_grad_()
        counts = whole.redistribute(placements=[Replicate()], forward_dtype=torch.int64)
        assert not counts.requires_grad
        assert counts.to_local().tolist() == [0, 1, 2, 3]
        moved = x.redistribute(placements=[Replicate()], forward_dtype=BF16)
        moved.mul_(2)  # what was cast is nobody's view
        assert torch.equal(moved.full_tensor(), torch.arange(4.0).mul(2).to(BF16))

    comm.simulate(2).run(rank_main)


def test_a_redistributed_copy_shares_no_memory() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(4), mesh)
        x.redistribute(placements=[Shard(0)]).add_(1)
        assert x.to_local().tolist() == [0.0] * 4

    comm.simulate(2).run(rank_main)


@pytest.mark.parametrize("shape", [(4, 2, 2), (4, 2, 4), (2, 2, 2), (5, 2, 3)], ids=str)
def test_what_was_moved_is_contiguous_as_the_whole_is(shape: tuple[int, ...]) -> None:
    """Else a view that one device allows would be refused, on some ranks only."""

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(float(math.prod(shape))).reshape(shape)
        layouts = [Replicate(), Shard(0), Shard(1), Shard(2)]
        for before, after in itertools.permutations(layouts, 2):
            x = distribute_tensor(whole, mesh, [before], src_data_rank=None)
            moved = x.redistribute(placements=[after]).to_local()
            assert moved.is_contiguous(), (before, after, moved.shape, moved.stride())

    comm.simulate(2).run(rank_main)
