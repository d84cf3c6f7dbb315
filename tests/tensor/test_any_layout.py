"""Any layout to any layout equals gather-then-slice, forward and backward, and sends the bytes that the plan promised.

Gathering and slicing are done here, from lists of indices, on tensors that every rank handed in: nothing of the code
under test takes part in them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx import comm
from phalanx.comm import init_device_mesh, observe
from phalanx.tensor import (
    DTensor,
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from phalanx.tensor.layout._placement import indices_of
from phalanx.tensor.redistribute._plan import plan_redistribute
from processes import Worker, run_processes

Sizes = tuple[int, ...]
Layout = tuple[Placement, ...]
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 1), (2, 1, 2), (2, 2, 2)]
OPS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float64: ("sum", "avg", "min", "max", "product"),
    torch.float32: ("sum", "avg", "min", "max", "product"),
    torch.bfloat16: ("sum", "avg", "min", "max"),
    torch.complex64: ("sum", "avg"),
    torch.int64: ("sum", "min", "max", "product"),
    torch.int16: ("sum", "min", "max"),
    torch.bool: ("min", "max"),
}
REDUCE = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax}
REFERENCE = {False: torch.float64, True: torch.complex128}


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: Sizes
    shape: Sizes
    dtype: torch.dtype
    before: Layout
    after: Layout
    async_op: bool = False
    turned: bool = False  # the local tensor is not contiguous
    given_shape: bool = True


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12]), max_size=3)))
    dtype = draw(st.sampled_from(list(OPS)))
    dims = len(shape)
    options: list[st.SearchStrategy[Placement]] = [
        st.just(Replicate()),
        st.sampled_from(OPS[dtype]).map(Partial),
    ]
    if "sum" in OPS[dtype]:
        options.append(st.just(MaskPartial()))
    if dims:
        dim = st.integers(-dims, dims - 1)
        options += [st.builds(Shard, dim)] * 3 + [st.builds(StridedShard, dim, st.integers(1, 4))]
    layout = st.tuples(*[st.one_of(options)] * len(mesh))
    flags = [draw(st.booleans()) for _ in range(3)]
    return Case(mesh, shape, dtype, draw(layout), draw(layout), *flags)


def rows(case: Case, layout: Layout, where: Sizes) -> list[list[int]]:
    """The indices of each dim that the rank at ``where`` holds."""
    dims = len(case.shape)
    return [
        indices_of(
            case.shape[dim],
            [(p, n, c) for p, n, c in zip(layout, case.mesh, where, strict=True)
             if isinstance(p, Shard) and p.dim % dims == dim],
        )
        for dim in range(dims)
    ]  # fmt: skip


def part_of(whole: Tensor, indices: list[list[int]]) -> Tensor:
    for dim, own in enumerate(indices):
        whole = whole.index_select(dim, torch.tensor(own, dtype=torch.int64))
    return whole.clone()


def partial_axes(layout: Layout) -> list[int]:
    return [axis for axis, p in enumerate(layout) if p.is_partial()]


def gathered(case: Case, layout: Layout, locals_: dict[Sizes, Tensor]) -> Tensor:
    """The value of the tensor of which ``locals_`` are the parts."""
    wide = REFERENCE[case.dtype.is_complex]
    axes = partial_axes(layout)
    sizes = [case.mesh[axis] for axis in axes]
    contributions = torch.full((*sizes, *case.shape), math.nan, dtype=wide)
    for where, local in locals_.items():
        own = contributions[tuple(where[axis] for axis in axes)]
        indices = rows(case, layout, where)
        assert local.shape == tuple(map(len, indices)), f"{where} holds {tuple(local.shape)}"
        where_to = [torch.tensor(one, dtype=torch.int64) for one in indices]
        own[tuple(torch.meshgrid(*where_to, indexing="ij")) if where_to else ...] = local.to(wide)
    for axis in reversed(axes):  # later axes are reduced first
        contributions = REDUCE[layout[axis].reduce_op](contributions, dim=axes.index(axis))  # type: ignore[attr-defined]  # a partial
    return contributions


def contributions_of(case: Case) -> Tensor:
    """One tensor for every coordinate on the partial axes of ``before``; small whole numbers."""
    sizes = [case.mesh[axis] for axis in partial_axes(case.before)]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-3, 4, (*sizes, *case.shape), generator=generator).to(case.dtype)


def gradient_of(case: Case) -> Tensor:
    return torch.randint(-3, 4, case.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)


def turn(local: Tensor) -> Tensor:
    """The same values, every second element of its memory."""
    wide = torch.empty((*local.shape, 2), dtype=local.dtype)
    wide[..., 0] = local
    return wide[..., 0].transpose(0, -1).contiguous().transpose(0, -1) if local.ndim > 1 else wide[..., 0]


def redistributed(mesh: Any, case: Case) -> dict[str, Any]:
    """Redistribute on this rank, and back; what it holds then."""
    where = mesh.get_coordinate()
    own = contributions_of(case)[tuple(where[axis] for axis in partial_axes(case.before))]
    local = part_of(own, rows(case, case.before, where))
    local = turn(local) if case.turned else local
    x = DTensor.from_local(local, mesh, case.before, shape=case.shape if case.given_shape else None).detach()
    assert tuple(x.shape) == case.shape, f"sizes were gathered wrong: {tuple(x.shape)}"
    plan = x.plan(case.after)
    result: dict[str, Any] = {"where": where, "grad": None}
    if is_differentiable(case):
        x.requires_grad_()
    with Counted() as sent:
        y = x.redistribute(placements=case.after, async_op=case.async_op)
        result["local"] = y.to_local().detach()
    assert sent.nbytes == plan.nbytes, f"{plan} sent {sent.nbytes} B"
    assert y.placements == plan.target.placements
    if not is_differentiable(case):
        return result
    back = plan_redistribute(plan.target.cotangent, plan.source.cotangent)
    given_rows = rows(case, back.source.placements, where)
    weights = part_of(gradient_of(case), given_rows)
    given_gradient = DTensor.from_local(weights, mesh, back.source.placements, shape=case.shape)
    with Counted() as sent:
        y.backward(given_gradient, retain_graph=True)
    assert sent.nbytes == back.nbytes, f"backward: {back} sent {sent.nbytes} B"
    assert x.grad is not None
    result["grad"] = x.grad.to_local()
    result["grad_layout"] = x.grad.placements
    check_double_backward(case, x, y, given_gradient)
    return result


class Counted:
    """Bytes of all collectives within."""

    def __enter__(self) -> Counted:
        self.nbytes = 0
        self._observer = observe(self._add)
        self._observer.__enter__()
        return self

    def _add(self, event: Any) -> None:
        self.nbytes += event.nbytes

    def __exit__(self, *error: Any) -> None:
        self._observer.__exit__(*error)


def is_differentiable(case: Case) -> bool:
    partials = [p for p in (*case.before, *case.after) if p.is_partial()]
    linear = all(p.is_partial("sum") or p.is_partial("avg") for p in partials)
    return linear and (case.dtype.is_floating_point or case.dtype.is_complex)


def check_double_backward(case: Case, x: DTensor, y: DTensor, given_gradient: DTensor) -> None:
    """The gradient of <gradient of x, v> by what was given is v; the move back is differentiated by the move."""
    weights, gradient = given_gradient.detach().requires_grad_(), gradient_of(case)
    (grad,) = torch.autograd.grad([y], [x], [weights], create_graph=True)
    direction = gradient.flip(0) if gradient.ndim else gradient
    own = part_of(direction, rows(case, grad.placements, x.device_mesh.get_coordinate()))
    with Counted() as sent:
        (again,) = torch.autograd.grad(
            [grad], [weights], [DTensor.from_local(own, x.device_mesh, grad.placements, shape=case.shape)]
        )
    if not partial_axes((*x.placements, *y.placements)):
        assert sent.nbytes == x.plan(case.after).nbytes, "double backward is the move itself"
    expected = part_of(direction, rows(case, again.placements, x.device_mesh.get_coordinate()))
    torch.testing.assert_close(again.to_local(), expected, msg=f"double backward of {case}")


def check(case: Case) -> None:
    simulation = comm.simulate(math.prod(case.mesh))
    check_results(case, simulation.run(lambda group: redistributed(init_device_mesh("cpu", case.mesh), case)))


def reduced(case: Case, contributions: Tensor) -> Any:
    axes = partial_axes(case.before)
    for axis in reversed(axes):
        contributions = REDUCE[case.before[axis].reduce_op](contributions, dim=axes.index(axis))  # type: ignore[attr-defined]  # a partial
    return contributions


def rounding_of(case: Case) -> Tensor:
    """How far a right result may be from the value, at most.

    An axis of n ranks is n - 1 additions and, for an average, a division, each rounded to the dtype; then it may be
    rounded once more where it is stored. k roundings of relative size u, of partial results no larger than what the
    magnitudes of the contributions add up to, are k u / (1 - k u) of that. The value itself may be smaller by any
    factor, where contributions cancel: it says nothing about the error. The reference rounds as often, in float64.
    """
    magnitude = reduced(case, contributions_of(case).to(REFERENCE[case.dtype.is_complex]).abs().double())
    if not (case.dtype.is_floating_point or case.dtype.is_complex):
        return torch.zeros_like(magnitude)
    count = 1 + sum(case.mesh[axis] for axis in partial_axes(case.before))
    steps = [count * torch.finfo(dtype).eps / 2 for dtype in (case.dtype, torch.float64)]
    return magnitude * sum(step / (1 - step) for step in steps)


def check_results(case: Case, results: list[dict[str, Any]]) -> None:
    expected = reduced(case, contributions_of(case).to(REFERENCE[case.dtype.is_complex]))
    bound = rounding_of(case)
    parts = {result["where"]: result["local"] for result in results}
    assert all(part.dtype == case.dtype for part in parts.values())

    def assert_right(found: Tensor, value: Tensor, limit: Tensor) -> None:
        assert found.shape == value.shape
        off = (found.to(value.dtype) - value).abs()
        assert (off <= limit).all(), f"{found} is off by {off}, where rounding explains {limit}"

    assert_right(gathered(case, case.after, parts), expected, bound)
    if not partial_axes(case.after):  # replicas agree, and each rank has its own part
        for where, part in parts.items():
            own = rows(case, case.after, where)
            assert_right(part, part_of(expected, own), part_of(bound, own))
    for result in results:
        if result["grad"] is not None:
            own = part_of(gradient_of(case), rows(case, result["grad_layout"], result["where"]))
            torch.testing.assert_close(result["grad"], own)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_any_layout_to_any_layout(case: Case) -> None:
    check(case)


def test_averages_that_cancel_are_off_by_their_rounding_only() -> None:
    """A sum of averages near zero: a tolerance relative to the result would not hold, in any implementation."""
    case = Case((2, 3), (60, 60), torch.bfloat16, (Partial("sum"), Partial("avg")), (Replicate(), MaskPartial()))
    check(case)
    value = reduced(case, contributions_of(case).double())
    averages = contributions_of(case).float().sum(1).to(torch.bfloat16) / 3
    rounded = (averages[0] + averages[1]).double()
    assert ((rounded - value).abs() > 1.6e-2 * value.abs() + 1e-5).any(), "such a case is among them"
    assert ((rounded - value).abs() <= rounding_of(case)).all()


@pytest.mark.soak
@pytest.mark.timeout(3000)
@settings(max_examples=5000, deadline=None)
@given(cases())
def test_any_layout_to_any_layout_for_long(case: Case) -> None:
    check(case)


def process_cases() -> list[Case]:
    """Layouts on 2 by 2 ranks, with every dtype and reduction."""
    rng = random.Random(0)
    found = []
    for dtype, shape in itertools.product(OPS, [(8, 4), (5, 3), (1, 6), ()]):
        cuts = [Shard(0), Shard(-1), StridedShard(0, 2)] if shape else []
        options = [Replicate(), *cuts, *map(Partial, OPS[dtype])]
        ends = [tuple(rng.choices(options, k=2)) for _ in range(4)]
        found += [
            Case((2, 2), shape, dtype, *ends[:2]),
            Case((2, 2), shape, dtype, *ends[2:], True, True, False),
        ]
    return found


def in_a_process(worker: Worker) -> list[dict[str, Any]]:
    group = worker.group(timeout=120.0)
    with comm.use_group(group):
        mesh = init_device_mesh("cpu", (2, 2))
        results = [redistributed(mesh, case) for case in process_cases()]
    # as numbers: tensors would travel as open files, and there are hundreds
    return [
        {name: (v.tolist(), v.shape, v.dtype) if isinstance(v, Tensor) else v for name, v in result.items()}
        for result in results
    ]


def unpacked(result: dict[str, Any]) -> dict[str, Any]:
    def tensor(values: Any, shape: Sizes, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).reshape(shape)

    packed = ("local", "grad")
    return {name: tensor(*v) if name in packed and v is not None else v for name, v in result.items()}


@pytest.mark.timeout(300)
def test_real_processes_send_what_simulated_ranks_send() -> None:
    outcomes = [outcome.value for outcome in run_processes(4, in_a_process)]
    for number, case in enumerate(process_cases()):
        check_results(case, [unpacked(results[number]) for results in outcomes])


def fsdp_cases() -> list[Case]:
    strided = (StridedShard(0, 2), Shard(0))
    others = itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=2)
    shapes = [(8, 4), (7, 3), (3, 5)]
    return [
        Case((2, 2), shape, torch.float64, *ends)
        for shape, other in itertools.product(shapes, others)
        for ends in ((strided, other), (other, strided))
    ]


@pytest.mark.parametrize("case", fsdp_cases(), ids=lambda case: f"{case.shape} {case.before}->{case.after}")
def test_strided_shards_where_two_parallelisms_meet(case: Case) -> None:
    check(case)


def test_of_different_reductions_the_later_axis_comes_first() -> None:
    """The sum of maxima is not the maximum of sums: which is meant must not depend on where the tensor goes."""
    parts = torch.randn(2, 3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    every = torch.arange(8.0).view(4, 2) + 1
    targets = [*itertools.product([Replicate(), Shard(0)], repeat=2), (Partial("product"), Partial("sum"))]

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 3))
        own = parts[mesh.get_local_rank(0), mesh.get_local_rank(1)]
        for outer, inner in itertools.product(REDUCE, repeat=2):
            expected = REDUCE[outer](REDUCE[inner](parts, dim=1), dim=0)
            mixed = (Partial(outer), Partial(inner))
            x = DTensor.from_local(own, mesh, mixed)
            for after in targets:
                found = x.redistribute(placements=after).full_tensor()
                torch.testing.assert_close(found, expected, msg=f"{mixed} -> {after}")
            replicated = distribute_tensor(every, mesh, src_data_rank=None)
            assert torch.equal(replicated.redistribute(placements=mixed).full_tensor(), every), mixed

    comm.simulate(6).run(rank_main)
