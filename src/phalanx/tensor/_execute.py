"""Running a redistribution plan on this rank's local tensor, differentiably.

Owns the executor of ``Step``s and the autograd node ``Move``. The backward of a move from A to B is the move from B's
cotangent to A's, and the backward of *that* is the move itself: the pair is an involution, which is what makes double
backward right for partial tensors. Reductions by min, max and product are not linear and have no backward here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.tensor._placement import Partial, Replicate, Shard, StridedShard, chunk_sizes, chunk_starts
from phalanx.tensor._plan import Plan, Step, plan_redistribute
from phalanx.tensor._spec import Spec

LINEAR_OPS = ("sum", "avg")


def run_plan(local: Tensor, plan: Plan) -> Tensor:
    """Run every step of ``plan`` on ``local``, without autograd."""
    for step in plan.steps:
        local = _ACTIONS[step.kind](local, step)
    return local


def redistribute_local(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """``local`` of a tensor laid out as ``source``, laid out as ``target``; differentiable."""
    if source is target:
        return local
    plan = plan_redistribute(source, target)
    if local.requires_grad and torch.is_grad_enabled():
        return move(local, plan)
    return run_plan(local, plan)


def move(local: Tensor, plan: Plan) -> Tensor:
    """``run_plan`` as an autograd node."""
    there_and_back = plan.source.variants.get(("move", plan.target))
    if there_and_back is None:
        _check_linear(plan)
        back = plan_redistribute(plan.target.cotangent, plan.source.cotangent)
        there_and_back = (plan, back, 1.0, _average_scale(plan.source, plan.target))
        plan.source.variants["move", plan.target] = there_and_back
    result: Tensor = _apply_move(local, *there_and_back)
    return result


def _average_scale(source: Spec, target: Spec) -> float:
    """A contribution to an average counts for one part in n: what its gradient is multiplied by on the way back."""
    scale = 1.0
    for axis, (before, after) in enumerate(zip(source.placements, target.placements, strict=True)):
        size = source.mesh.shape[axis]
        scale /= size if before.is_partial("avg") else 1
        scale *= size if after.is_partial("avg") else 1
    return scale


class Move(torch.autograd.Function):
    """Forward runs one plan, backward the other; applying it to the gradient swaps them."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, there: Plan, back: Plan, scale: float, scale_back: float) -> Tensor:
        ctx.plans = (there, back, scale, scale_back)
        moved = run_plan(local, there)
        if scale != 1.0:
            return moved * scale
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        there, back, scale, scale_back = ctx.plans
        grad = _apply_move(grads[0].contiguous(), back, there, scale_back, scale)
        return grad, None, None, None, None


# torch's own ``apply`` looks for functorch's and our wrappers among the arguments; here are none.
_apply_move: Any = super(torch.autograd.Function, Move).apply


def reduce_gradient(local: Tensor, groups: tuple[Group, ...]) -> Tensor:
    """``local`` itself; its gradient is summed over mesh axes where replicas did different work.

    A hook on an alias costs a third of an autograd node written in Python; where the gradient is itself differentiated
    (create_graph), the sum is such a node.
    """
    alias = local.view_as(local)
    # what register_hook does, without making a handle to remove the hook by
    alias._backward_hooks = OrderedDict({0: partial(_sum_gradient, groups)})
    alias.grad_fn._register_hook_dict(alias)  # type: ignore[union-attr]  # an alias of what requires grad has one
    return alias


def _sum_gradient(groups: tuple[Group, ...], grad: Tensor) -> Tensor:
    if torch.is_grad_enabled() and grad.requires_grad:
        apply: Any = _SumOver.apply
        result: Tensor = apply(grad, groups, True)
        return result
    return _sum_over(grad, groups)


class _SumOver(torch.autograd.Function):
    """Sum over groups one way, identity the other."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, groups: tuple[Group, ...], sums: bool) -> Tensor:
        ctx.groups, ctx.sums = groups, sums
        return _sum_over(local, groups) if sums else local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        apply: Any = _SumOver.apply
        return apply(grads[0], ctx.groups, not ctx.sums), None, None


def _sum_over(local: Tensor, groups: tuple[Group, ...]) -> Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    for group in groups:
        group.all_reduce(total)
    return total


def _check_linear(plan: Plan) -> None:
    for step in plan.steps:
        before = step.source.placements[step.axis]
        if isinstance(before, Partial) and before.reduce_op not in LINEAR_OPS:
            raise RuntimeError(
                f"rank {plan.source.mesh.get_rank()}: {before!r} cannot be reduced where a gradient is needed; "
                f"redistribute before the reduction, or detach"
            )


def _axis_lengths(step: Step, sharded: Spec, dim: int) -> tuple[int, ...]:
    """How long each rank's part of ``dim`` is along the step's axis (where ``sharded`` cuts it, innermost)."""
    found: tuple[int, ...] | None = sharded.variants.get(("lengths", step.axis))
    if found is None:
        found = sharded.variants["lengths", step.axis] = _find_axis_lengths(step, sharded, dim)
    return found


def _find_axis_lengths(step: Step, sharded: Spec, dim: int) -> tuple[int, ...]:
    whole = sharded.with_placements(
        tuple(Replicate() if axis == step.axis else p for axis, p in enumerate(sharded.placements))
    ).local_shape[dim]
    placement = sharded.placements[step.axis]
    parts = sharded.mesh.shape[step.axis]
    if isinstance(placement, StridedShard):
        blocks = chunk_sizes(whole, placement.split_factor)
        return tuple(sum(chunk_sizes(size, parts)[i] for size in blocks) for i in range(parts))
    return chunk_sizes(whole, parts)


def _group(step: Step) -> Group:
    return step.source.mesh.get_group(step.axis)


def _all_gather(local: Tensor, step: Step) -> Tensor:
    placement = step.source.placements[step.axis]
    assert isinstance(placement, Shard), f"{step!r} gathers a shard"
    dim, lengths = placement.dim, _axis_lengths(step, step.source, placement.dim)
    if isinstance(placement, StridedShard):
        return _weave(_gather_parts(local, step, dim, lengths), dim, placement, step)
    if len(set(lengths)) == 1:
        front = (local.transpose(0, dim) if dim else local).contiguous()
        output = front.new_empty((front.shape[0] * len(lengths), *front.shape[1:]))
        _group(step).all_gather_into_tensor(output, front)
        return output.transpose(0, dim).contiguous() if dim else output
    return torch.cat(_gather_parts(local, step, dim, lengths), dim)


def _gather_parts(local: Tensor, step: Step, dim: int, lengths: tuple[int, ...]) -> list[Tensor]:
    outputs = [local.new_empty(_resized(local, dim, length)) for length in lengths]
    _group(step).all_gather(outputs, local.contiguous())
    return outputs


def _weave(parts: list[Tensor], dim: int, placement: StridedShard, step: Step) -> Tensor:
    """Put strided parts back in order: block b is part 0's piece of b, then part 1's, and so on."""
    whole = step.target.local_shape[dim]
    pieces = []
    taken = [0] * len(parts)
    for block in chunk_sizes(whole, placement.split_factor):
        for rank, size in enumerate(chunk_sizes(block, len(parts))):
            pieces.append(parts[rank].narrow(dim, taken[rank], size))
            taken[rank] += size
    return torch.cat(pieces, dim)


def _all_to_all(local: Tensor, step: Step) -> Tensor:
    before, after = step.source.placements[step.axis], step.target.placements[step.axis]
    assert isinstance(before, Shard), f"{step!r} exchanges shards"
    assert isinstance(after, Shard), f"{step!r} exchanges shards"
    sent = [
        part.contiguous()
        for part in torch.split(local, list(_axis_lengths(step, step.target, after.dim)), after.dim)
    ]
    mine = _resized(local, after.dim, step.target.local_shape[after.dim])
    received = []
    for length in _axis_lengths(step, step.source, before.dim):
        shape = list(mine)
        shape[before.dim] = length
        received.append(local.new_empty(shape))
    _group(step).all_to_all(received, sent)
    return torch.cat(received, before.dim)


def _all_reduce(local: Tensor, step: Step) -> Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    _group(step).all_reduce(total, _reduce_op(step))
    return total


def _reduce_scatter(local: Tensor, step: Step) -> Tensor:
    after = step.target.placements[step.axis]
    assert isinstance(after, Shard), f"{step!r} scatters to a shard"
    lengths = _axis_lengths(step, step.target, after.dim)
    group, op = _group(step), _reduce_op(step)
    if len(set(lengths)) == 1:
        front = (local.transpose(0, after.dim) if after.dim else local).contiguous()
        output = front.new_empty((lengths[0], *front.shape[1:]))
        group.reduce_scatter_tensor(output, front, op)
        return output.transpose(0, after.dim).contiguous() if after.dim else output
    parts = [part.contiguous() for part in torch.split(local, list(lengths), after.dim)]
    output = torch.empty_like(parts[group.rank])
    group.reduce_scatter(output, parts, op)
    return output


def _slice(local: Tensor, step: Step) -> Tensor:
    after = step.target.placements[step.axis]
    assert isinstance(after, Shard), f"{step!r} slices to a shard"
    coordinate, parts = step.target.coordinate[step.axis], step.target.mesh.shape[step.axis]
    whole = local.shape[after.dim]
    if isinstance(after, StridedShard):
        pieces = []
        blocks = zip(
            chunk_starts(whole, after.split_factor), chunk_sizes(whole, after.split_factor), strict=True
        )
        for start, size in blocks:
            at = start + chunk_starts(size, parts)[coordinate]
            pieces.append(local.narrow(after.dim, at, chunk_sizes(size, parts)[coordinate]))
        return torch.cat(pieces, after.dim)
    start, size = chunk_starts(whole, parts)[coordinate], chunk_sizes(whole, parts)[coordinate]
    return local.narrow(after.dim, start, size).clone(memory_format=torch.contiguous_format)


def _split(local: Tensor, step: Step) -> Tensor:
    """Replicate to Partial: one rank keeps the value, the others hold what changes nothing."""
    after = step.target.placements[step.axis]
    assert isinstance(after, Partial), f"{step!r} makes a partial"
    if after.reduce_op in ("avg", "min", "max") or step.target.coordinate[step.axis] == 0:
        return local.clone()
    return torch.ones_like(local) if after.reduce_op == "product" else torch.zeros_like(local)


def _relabel(local: Tensor, step: Step) -> Tensor:
    return local


def _reduce_op(step: Step) -> str:
    before = step.source.placements[step.axis]
    assert isinstance(before, Partial), f"{step!r} reduces a partial"
    return before.reduce_op


def _resized(local: Tensor, dim: int, length: int) -> list[int]:
    shape = list(local.shape)
    shape[dim] = length
    return shape


_ACTIONS: dict[str, Callable[[Tensor, Step], Tensor]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "split": _split,
    "relabel": _relabel,
}
