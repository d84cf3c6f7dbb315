"""The steps of a redistribution on this rank's local tensor: what each sends, and what it makes of what arrives.

Owns ``actions_of`` (plan -> actions). Whatever follows from the layouts alone (sizes, offsets, groups) is worked out
when the action is made, once; running it touches nothing but data. No autograd here: that is ``_execute.py``.

An action is a pair. ``begin(local, async_op)`` starts the collective and returns its handle and what it fills;
``finish(filled)`` makes the local tensor of it when the collective is done (None: it is that tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.comm._checks import MOVED, PLAIN
from phalanx.comm._fitting import all_reduce_fitting, exchange_fitting, gather_fitting, reduce_scatter_fitting
from phalanx.tensor._log import log_redistribution
from phalanx.tensor._placement import Partial, Replicate, Shard, StridedShard, chunk_sizes, chunk_starts
from phalanx.tensor._plan import Plan, Step
from phalanx.tensor._spec import Spec

Begin = Callable[[Tensor, bool], tuple[Any, Any]]
Finish = Callable[[Any], Tensor] | None
Action = tuple[Begin, Finish]
_CONTIGUOUS = torch.contiguous_format


def actions_of(plan: Plan) -> list[Action]:
    """One action for each step of ``plan``, made at its first run."""
    if plan.steps and not plan.actions:
        plan.actions.extend([_ACTIONS[step.kind](step) for step in plan.steps])
        log_redistribution(plan)
    return plan.actions


def _axis_lengths(step: Step, sharded: Spec, dim: int) -> tuple[int, ...]:
    """How long each rank's part of ``dim`` is along the step's axis (where ``sharded`` cuts it, innermost)."""
    whole = sharded.with_placements(
        tuple(Replicate() if axis == step.axis else p for axis, p in enumerate(sharded.placements))
    ).local_shape[dim]
    placement = sharded.placements[step.axis]
    parts = sharded.mesh.shape[step.axis]
    if isinstance(placement, StridedShard):
        blocks = chunk_sizes(whole, placement.split_factor)
        return tuple(sum(chunk_sizes(size, parts)[i] for size in blocks) for i in range(parts))
    return chunk_sizes(whole, parts)


def group_of(step: Step) -> Group:
    return step.source.mesh.get_group(step.axis)


def _all_gather(step: Step) -> Action:
    placement, group = step.source.placements[step.axis], group_of(step)
    assert isinstance(placement, Shard), f"{step!r} gathers a shard"
    dim, lengths = placement.dim, _axis_lengths(step, step.source, placement.dim)
    if len(set(lengths)) == 1 and type(placement) is Shard:
        return _even_gather(group, dim, step)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        outputs = [local.new_empty(_resized(local, dim, length)) for length in lengths]
        return group.all_gather(outputs, local.contiguous(), async_op=async_op), outputs

    if isinstance(placement, StridedShard):
        strided, whole = placement, step.target.local_shape[dim]
        return begin, lambda outputs: _weave(outputs, dim, strided, whole)
    return begin, lambda outputs: torch.cat(outputs, dim)


def _even_gather(group: Group, dim: int, step: Step) -> Action:
    front = list(step.source.local_shape)
    front[0], front[dim] = front[dim], front[0]
    shape = (front[0] * group.size, *front[1:])
    fits = step.source.dtype in MOVED and 0 not in shape
    gather = gather_fitting(group) if fits else group.all_gather_into_tensor

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = (local.transpose(0, dim) if dim else local).contiguous()
        output = sent.new_empty(*shape)  # a tuple takes longer
        return gather(output, sent, async_op=async_op), output

    return begin, _back_to(dim)


def _back_to(dim: int) -> Finish:
    """Undo the exchange of ``dim`` and the first dim that a flat collective needs."""
    return (lambda output: output.transpose(0, dim).contiguous()) if dim else None


def _weave(parts: list[Tensor], dim: int, placement: StridedShard, whole: int) -> Tensor:
    """Put strided parts back in order: block b is part 0's piece of b, then part 1's, and so on."""
    pieces = []
    taken = [0] * len(parts)
    for block in chunk_sizes(whole, placement.split_factor):
        for rank, size in enumerate(chunk_sizes(block, len(parts))):
            pieces.append(parts[rank].narrow(dim, taken[rank], size))
            taken[rank] += size
    return torch.cat(pieces, dim)


def _all_to_all(step: Step) -> Action:
    before, after = step.source.placements[step.axis], step.target.placements[step.axis]
    assert isinstance(before, Shard), f"{step!r} exchanges shards"
    assert isinstance(after, Shard), f"{step!r} exchanges shards"
    group, leaving = group_of(step), after.dim
    sizes = list(_axis_lengths(step, step.target, after.dim))
    lengths = _axis_lengths(step, step.source, before.dim)
    even = len(set(sizes)) == 1 == len(set(lengths)) and 0 not in step.source.local_shape
    if even and step.source.dtype in MOVED:
        return _even_exchange(group, before.dim, after.dim, step)
    shapes = []
    for length in lengths:
        shape = list(step.source.local_shape)
        shape[after.dim], shape[before.dim] = step.target.local_shape[after.dim], length
        shapes.append(shape)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = [part.contiguous() for part in torch.split(local, sizes, leaving)]
        received = [local.new_empty(shape) for shape in shapes]
        return group.all_to_all(received, sent, async_op=async_op), received

    arriving = before.dim
    return begin, lambda received: torch.cat(received, arriving)


def _even_exchange(group: Group, arriving: int, leaving: int, step: Step) -> Action:
    """Equal parts travel as one tensor, rank by rank in front; a copy only where the dim is not the first."""
    shape, target = step.source.local_shape, step.target.local_shape
    part = (*shape[:leaving], target[leaving], *shape[leaving + 1 :])
    # what view(..., ranks, size, ...).movedim(leaving, 0) of a contiguous tensor is, in one call
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    cut, cut_strides = (group.size, *part), (target[leaving] * strides[leaving], *strides)
    exchange = exchange_fitting(group)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = local.contiguous()
        sent = torch.as_strided_copy(sent, cut, cut_strides) if leaving else sent.view(cut)
        received = torch.empty_like(sent)
        return exchange(received, sent, async_op=async_op), received

    if arriving == 0:
        return begin, lambda received: received.view(target)
    # not reshape, which leaves parts of size one in their order: what is moved must take the views that a whole takes
    return begin, lambda received: received.movedim(0, arriving).contiguous().view(target)


def reduction_in_place(step: Step) -> Callable[..., Any]:
    """``all_reduce(tensor, async_op=...)`` of the step, for a contiguous tensor of the layout it begins with."""
    group, op = group_of(step), _reduce_op(step)
    plain = PLAIN[op].get(step.source.dtype) if 0 not in step.source.local_shape else None
    return partial(group.all_reduce, op=op) if plain is None else all_reduce_fitting(group, plain)


def _all_reduce(step: Step) -> Action:
    all_reduce = reduction_in_place(step)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        total = local.clone(memory_format=_CONTIGUOUS)
        return all_reduce(total, async_op=async_op), total

    return begin, None


def _reduce_scatter(step: Step) -> Action:
    after = step.target.placements[step.axis]
    assert isinstance(after, Shard), f"{step!r} scatters to a shard"
    dim, lengths = after.dim, list(_axis_lengths(step, step.target, after.dim))
    group, op = group_of(step), _reduce_op(step)
    if len(set(lengths)) == 1:
        return _even_reduce_scatter(group, dim, lengths[0], op, step)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        parts = [part.contiguous() for part in torch.split(local, lengths, dim)]
        output = torch.empty_like(parts[group.rank])
        return group.reduce_scatter(output, parts, op, async_op=async_op), output

    return begin, None


def _even_reduce_scatter(group: Group, dim: int, length: int, op: str, step: Step) -> Action:
    front = list(step.source.local_shape)
    front[0], front[dim] = front[dim], front[0]
    shape = (length, *front[1:])
    plain = PLAIN[op].get(step.source.dtype) if 0 not in front else None
    checked = partial(group.reduce_scatter_tensor, op=op)
    scatter = checked if plain is None else reduce_scatter_fitting(group, plain)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = (local.transpose(0, dim) if dim else local).contiguous()
        output = sent.new_empty(*shape)  # a tuple takes longer
        return scatter(output, sent, async_op=async_op), output

    return begin, _back_to(dim)


def _slice(step: Step) -> Action:
    after = step.target.placements[step.axis]
    assert isinstance(after, Shard), f"{step!r} slices to a shard"
    coordinate, parts = step.target.coordinate[step.axis], step.target.mesh.shape[step.axis]
    dim, whole = after.dim, step.source.local_shape[after.dim]
    if isinstance(after, StridedShard):
        factor = after.split_factor
        blocks = zip(chunk_starts(whole, factor), chunk_sizes(whole, factor), strict=True)
        pieces = [
            (start + chunk_starts(size, parts)[coordinate], chunk_sizes(size, parts)[coordinate])
            for start, size in blocks
        ]
        return _local(lambda local: torch.cat([local.narrow(dim, at, size) for at, size in pieces], dim))
    start, size = chunk_starts(whole, parts)[coordinate], chunk_sizes(whole, parts)[coordinate]
    return _local(lambda local: torch.narrow_copy(local, dim, start, size))


def _split(step: Step) -> Action:
    """Replicate to Partial: one rank keeps the value, the others hold what changes nothing."""
    after = step.target.placements[step.axis]
    assert isinstance(after, Partial), f"{step!r} makes a partial"
    if after.reduce_op in ("avg", "min", "max") or step.target.coordinate[step.axis] == 0:
        return _local(torch.clone)
    return _local(torch.ones_like if after.reduce_op == "product" else torch.zeros_like)


def _relabel(step: Step) -> Action:
    return _local(lambda local: local)


def _local(compute: Callable[[Tensor], Tensor]) -> Action:
    """An action that sends nothing, and so has nothing to wait for."""
    return lambda local, async_op: (None, compute(local)), None


def _reduce_op(step: Step) -> str:
    before = step.source.placements[step.axis]
    assert isinstance(before, Partial), f"{step!r} reduces a partial"
    return before.reduce_op


def _resized(local: Tensor, dim: int, length: int) -> list[int]:
    shape = list(local.shape)
    shape[dim] = length
    return shape


_ACTIONS: dict[str, Callable[[Step], Action]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "split": _split,
    "relabel": _relabel,
}
