"""Any layout to any layout: equals gather-then-slice, forward and backward, and sends the bytes the plan promised."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import comm
from phalanx.comm import init_device_mesh, observe
from phalanx.tensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor
from phalanx.tensor._plan import plan_redistribute
from phalanx.tensor._spec import Spec

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


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(2, 2), (2, 3), (2, 2, 2)]),
    st.sampled_from([(4, 6), (5, 7), (3,), (2, 3, 4)]),
    st.data(),
)
def test_any_pair_of_layouts_on_more_axes(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], data: st.DataObject
) -> None:
    options = st.sampled_from(
        [Replicate(), Partial("sum"), Partial("avg"), *(Shard(d) for d in range(len(shape)))]
    )
    layouts = st.tuples(*[options] * len(mesh_shape))
    check(mesh_shape, shape, data.draw(layouts), data.draw(layouts))


@pytest.mark.parametrize("shape", [(8,), (7,), (3,), (8, 3)], ids=str)
def test_strided_shards_where_two_parallelisms_meet(shape: tuple[int, ...]) -> None:
    strided = (StridedShard(0, split_factor=2), Shard(0))
    for other in ((Replicate(), Replicate()), (Shard(0), Shard(0)), (Replicate(), Shard(0))):
        check((2, 2), shape, strided, other)
        check((2, 2), shape, other, strided)


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


REDUCTIONS = {
    "sum": torch.sum,
    "avg": torch.mean,
    "product": torch.prod,
    "min": torch.amin,
    "max": torch.amax,
}


def test_of_different_reductions_the_later_axis_comes_first() -> None:
    """The sum of maxima is not the maximum of sums: which is meant must not depend on where the tensor goes."""
    parts = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    every = torch.arange(8.0).view(4, 2) + 1
    targets = [*itertools.product([Replicate(), Shard(0)], repeat=2), (Partial("product"), Partial("sum"))]

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 3))
        own = parts[mesh.get_local_rank(0), mesh.get_local_rank(1)]
        for outer, inner in itertools.product(REDUCTIONS, repeat=2):
            expected = REDUCTIONS[outer](REDUCTIONS[inner](parts, dim=1), dim=0)
            mixed = (Partial(outer), Partial(inner))
            x = DTensor.from_local(own, mesh, mixed)
            for after in targets:
                found = x.redistribute(placements=after).full_tensor()
                torch.testing.assert_close(found, expected, msg=f"{mixed} -> {after}")
            replicated = distribute_tensor(every, mesh, src_data_rank=None)
            assert torch.equal(replicated.redistribute(placements=mixed).full_tensor(), every), mixed

    comm.simulate(6).run(rank_main)


def test_dtypes_on_the_way() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(4, 4, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
        y = x.redistribute(
            placements=[Replicate()], forward_dtype=torch.float32, backward_dtype=torch.float64
        )
        assert y.dtype == torch.float32
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float64
        # one and 2**-12 is one in bfloat16, and itself in float32
        fine = torch.full((4, 4), 1 + 2**-12, dtype=torch.float64)
        for travels, rounded in ((torch.bfloat16, torch.ones_like(fine)), (torch.float32, fine)):
            x.grad = None
            y = x.redistribute(placements=[Shard(1)], backward_dtype=travels)
            assert torch.equal(y.full_tensor(), x.full_tensor())
            y.backward(distribute_tensor(fine, mesh, [Shard(1)], src_data_rank=None))
            assert x.grad is not None
            assert torch.equal(x.grad.full_tensor(), rounded)

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
