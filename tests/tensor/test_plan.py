"""The planner against the slow reference: no plan is cheaper, and a strided cut moves alone where it can."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import RankGrid, cheapest_cost, layouts, pairs

from phalanx.tensor import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from phalanx.tensor.layout._placement import indices_of, inner_shard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._plan import Plan, least_cost, plan_redistribute

pytestmark = pytest.mark.fast
R = Replicate()
PARTIALS = [Partial("sum"), Partial("avg"), Partial("max"), Partial("product")]


def planned(mesh: tuple[int, ...], shape: tuple[int, ...], source: Any, target: Any) -> Plan:
    start = Spec.of(RankGrid(mesh), source, shape, torch.float64)  # type: ignore[arg-type]  # what a plan needs of one
    return plan_redistribute(start, start.with_placements(target))


def compare(
    mesh: tuple[int, ...], shape: tuple[int, ...], others: list[Placement], number: int | None, **asides: Any
) -> None:
    rng = random.Random(f"{mesh}{shape}")
    for source, target in pairs(layouts(mesh, shape, others), rng, number):
        plan = planned(mesh, shape, source, target)
        best = cheapest_cost(mesh, shape, 8, source, target, **asides)
        assert plan.communicates == (best >= 4096), f"{source} -> {target}: {plan}"
        if plan.communicates:  # else all there is to gain is local work
            assert plan.cost <= best * (1 + 1e-9), f"{source} -> {target}: {plan} costs {plan.cost}, not {best}"
        assert least_cost(plan.source, plan.target) <= plan.cost


SMALL = [
    ((4,), (7, 5), PARTIALS),
    ((3,), (), PARTIALS),
    ((3,), (0, 4), PARTIALS),
    ((2, 2), (64, 64), PARTIALS),
    ((2, 2), (3,), PARTIALS),  # empty shards
    ((2, 3), (61, 67), PARTIALS),
    ((2, 4), (60, 8, 20), [Partial()]),
    ((2, 1, 3), (40, 12), [Partial()]),
    ((2, 2, 2), (128, 9), [Partial()]),
    ((2, 2, 2), (5, 3), [Partial()]),
]


@pytest.mark.parametrize(("mesh", "shape", "others"), SMALL, ids=str)
def test_no_plan_is_cheaper(mesh: Any, shape: Any, others: Any) -> None:
    compare(mesh, shape, others, 80 if len(mesh) < 3 else 25)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("mesh", "shape", "others"), SMALL, ids=str)
def test_no_plan_is_cheaper_of_all_pairs(mesh: Any, shape: Any, others: Any) -> None:
    compare(mesh, shape, others, None)


@pytest.mark.parametrize(("mesh", "shape"), [((2, 2), (64, 64)), ((2, 3), (61, 7)), ((2, 2), (5, 2))], ids=str)
def test_no_plan_on_two_axes_is_cheaper_by_strided_cuts_on_the_way(mesh: Any, shape: Any) -> None:
    compare(mesh, shape, PARTIALS[:2], 80, asides=[StridedShard(dim, mesh[1]) for dim in range(2)])


@pytest.mark.parametrize("length", [64, 61])
def test_no_plan_between_strided_and_plain_layouts_is_cheaper(length: int) -> None:
    """As FSDP makes them: the first axis is strided around the second's cut."""
    mesh, shape = (2, 2), (length, 12)
    ends = [layout for layout in layouts(mesh, shape, [Partial()]) if layout[1] != Shard(1)]
    strided = (StridedShard(0, 2), Shard(0))
    for other in ends:
        for source, target in ((strided, other), (other, strided)):
            plan = planned(mesh, shape, source, target)
            best = cheapest_cost(mesh, shape, 8, source, target, [StridedShard(0, 2)])
            assert plan.cost <= best * (1 + 1e-9), f"{source} -> {target}: {plan} costs {plan.cost}, not {best}"


def kinds(mesh: tuple[int, ...], shape: tuple[int, ...], source: Any, target: Any) -> list[tuple[str, int]]:
    return [(step.kind, step.nbytes) for step in planned(mesh, shape, source, target).steps]


def test_a_strided_shard_is_gathered_over_its_own_axis_only() -> None:
    strided, tp = (StridedShard(0, 4), Shard(0)), Shard(0)
    assert kinds((2, 4), (64, 8), strided, (R, tp)) == [("all_gather", 1024)]
    assert kinds((2, 4), (64, 8), (R, tp), strided) == [("slice", 0)]
    assert kinds((2, 4), (64, 8), (Partial(), tp), strided) == [("reduce_scatter", 1024)]
    assert kinds((2, 2, 2), (64, 8), (StridedShard(0, 4), tp, tp), (R, tp, tp)) == [("all_gather", 1024)]


def test_a_cut_becomes_partial_without_sending() -> None:
    for after in (Partial("sum"), Partial("product"), MaskPartial()):
        assert kinds((2,), (64, 8), (Shard(0),), (after,)) == [("pad", 0)]
    assert kinds((2,), (64, 8), (Shard(0),), (Partial("max"),)) == [("all_gather", 4096), ("split", 0)]


def test_a_cut_is_put_aside_where_that_sends_less() -> None:
    shape = (1024, 1024)
    nested = planned((4, 4), shape, (Shard(0), Shard(0)), (R, Shard(0)))
    assert nested.nbytes < 0.5 * 8 * 1024 * 1024, f"by gathering both axes it is 1.25 times the whole: {nested}"
    swapped = planned((4, 4), shape, (Shard(0), Shard(1)), (Shard(1), Shard(0)))
    assert [step.kind for step in swapped.steps] == ["all_to_all"] * 3


def test_meshes_of_many_axes_have_plans() -> None:
    """More layouts than are looked at: only those of both ends are."""
    before = (Shard(0), Shard(1), Shard(0), R, Partial(), Shard(2))
    after = (R, Shard(0), Partial(), Shard(3), R, R)
    plan = planned((2,) * 6, (8, 8, 8, 8), before, after)
    assert plan.steps[0].source.placements == before
    assert plan.steps[-1].target.placements == after


cuts = st.one_of(st.builds(Shard, st.just(0)), st.builds(StridedShard, st.just(0), st.integers(1, 6)))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 40),
    st.lists(st.tuples(cuts, st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_an_inner_cut_is_the_cut_of_what_the_others_leave(length: int, layout: Any, axis: int) -> None:
    axis %= len(layout)
    mesh = [size for _, size in layout]
    found = inner_shard(length, mesh, [p for p, _ in layout], axis)
    if found is None:
        return
    for where in itertools.product(*map(range, mesh)):
        every = [(p, size, own) for (p, size), own in zip(layout, where, strict=True)]
        left = indices_of(length, [*every[:axis], *every[axis + 1 :]])
        mine = [left[i] for i in indices_of(len(left), [(found, mesh[axis], where[axis])])]
        assert mine == indices_of(length, every), f"{layout} of {length} at {where}: {found}"
