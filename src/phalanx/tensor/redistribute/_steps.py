"""The steps of a redistribution on this rank's local tensor: what each sends, and what it makes of what arrives.

Owns ``actions_of`` (plan -> actions). Whatever follows from the layouts alone (sizes, offsets, groups) is worked out
when the action is made, once; running it touches nothing but data. No autograd here: that is ``_execute.py``.

An action is a pair. ``begin(local, async_op)`` starts the collective and returns its handle and what it fills;
``finish(filled)`` makes the local tensor of it when the collective is done (None: it is that tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx._without_modes import without_user_modes
from phalanx.comm import Group
from phalanx.comm.group._checks import MOVED, PLAIN
from phalanx.comm.group._fitting import (
    all_reduce_fitting,
    exchange_fitting,
    gather_fitting,
    reduce_scatter_fitting,
)
from phalanx.tensor.layout._placement import (
    REPLICATE,
    Partial,
    Shard,
    StridedShard,
    chunk_sizes,
    chunk_starts,
    held_size,
    inner_shard,
)
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._log import log_redistribution
from phalanx.tensor.redistribute._plan import Plan, RedistributeStep

Begin = Callable[[Tensor, bool], tuple[Any, Any]]
Finish = Callable[[Any], Tensor] | None
Action = tuple[Begin, Finish]
_CONTIGUOUS = torch.contiguous_format


def actions_of(plan: Plan) -> list[Action]:
    """Return one action for each step of ``plan``, made at its first run."""
    if plan.steps and not plan.actions:
        with without_user_modes():
            made = [_ACTIONS[step.kind](step) for step in plan.steps]
        plan.actions.extend(made)
        log_redistribution(plan)
    return plan.actions


class _AxisShards:
    """How the step's axis shards what the other axes leave of a dim in ``sharded``, and who holds which rows."""

    def __init__(self, step: RedistributeStep, sharded: Spec) -> None:
        axis, mesh = step.axis, sharded.mesh
        given = sharded.placements[axis]
        assert isinstance(given, Shard), f"{step!r} has no cut in {sharded!r}"
        axis_shards = inner_shard(sharded.shape[given.dim], mesh.shape, sharded.placements, axis)
        assert axis_shards is not None, f"{step!r} was planned with cuts inside of its own"
        joined = [REPLICATE if other == axis else p for other, p in enumerate(sharded.placements)]
        self.dim = given.dim
        self.num_shards = mesh.shape[axis]
        self.joined = sharded.with_placements(joined).local_shape[given.dim]
        self.blocks = axis_shards.split_factor if isinstance(axis_shards, StridedShard) else 1
        self.lengths = tuple(
            held_size(self.joined, [(axis_shards, self.num_shards, i)]) for i in range(self.num_shards)
        )
        self.is_even = self.blocks == 1 and len(set(self.lengths)) == 1

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Start and size of each range of rows that ``rank`` holds."""
        blocks = zip(chunk_starts(self.joined, self.blocks), chunk_sizes(self.joined, self.blocks), strict=True)
        return [
            (start + chunk_starts(size, self.num_shards)[rank], chunk_sizes(size, self.num_shards)[rank])
            for start, size in blocks
        ]

    def rows(self, rank: int) -> Tensor:
        """Return the numbers of all these rows."""
        return torch.cat([torch.arange(start, start + size) for start, size in self.ranges(rank)])

    def split(self, local: Tensor) -> list[Tensor]:
        """Split ``local`` into the shard of each rank."""
        return [self.shard_of(local, rank) for rank in range(self.num_shards)]

    def shard_of(self, local: Tensor, rank: int) -> Tensor:
        pieces = [local.narrow(self.dim, start, size) for start, size in self.ranges(rank)]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, shards: list[Tensor]) -> Tensor:
        """Return all ranks' shards joined: of each block rank 0's piece, then rank 1's, and so on."""
        if self.blocks == 1:
            return torch.cat(shards, self.dim)
        pieces, taken = [], [0] * self.num_shards
        for block in chunk_sizes(self.joined, self.blocks):
            for rank, size in enumerate(chunk_sizes(block, self.num_shards)):
                pieces.append(shards[rank].narrow(self.dim, taken[rank], size))
                taken[rank] += size
        return torch.cat(pieces, self.dim)


def group_of(step: RedistributeStep) -> Group:
    return step.source.mesh.get_group(step.axis)


def _all_gather(step: RedistributeStep) -> Action:
    group, axis_shards = group_of(step), _AxisShards(step, step.source)
    if axis_shards.is_even:
        return _even_gather(group, axis_shards.dim, step)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        outputs = [local.new_empty(_resized(local, axis_shards.dim, length)) for length in axis_shards.lengths]
        return group.all_gather(outputs, local.contiguous(), async_op=async_op), outputs

    return begin, axis_shards.join


def _even_gather(group: Group, dim: int, step: RedistributeStep) -> Action:
    front = list(step.source.local_shape)
    front[0], front[dim] = front[dim], front[0]
    shape = (front[0] * group.size, *front[1:])
    fits = step.source.dtype in MOVED and 0 not in shape
    gather = gather_fitting(group) if fits else group.all_gather_into_tensor

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = (local.transpose(0, dim) if dim else local).contiguous()
        output = sent.new_empty(*shape)  # a tuple takes longer
        return gather(output, sent, async_op=async_op), output

    return begin, _back_to(dim, shape)


def _back_to(dim: int, shape: Sequence[int]) -> Finish:
    """Undo the exchange of ``dim`` and the first dim that a flat collective needs; its output has this shape."""
    if not dim:
        return None
    with without_user_modes():
        back = torch.empty(shape, device="meta").transpose(0, dim)
    if back.is_contiguous():  # nothing is between them; the strides of a dim with one row must be row-major too
        return lambda output: output.view(back.shape)
    return lambda output: output.transpose(0, dim).contiguous()


def _all_to_all(step: RedistributeStep) -> Action:
    group, arriving, leaving = group_of(step), _AxisShards(step, step.source), _AxisShards(step, step.target)
    if arriving.dim == leaving.dim:
        return _reorder(step, arriving, leaving)
    even = arriving.is_even and leaving.is_even and 0 not in step.source.local_shape
    if even and step.source.dtype in MOVED:
        return _even_exchange(group, arriving.dim, leaving.dim, step)
    shapes = []
    for length in arriving.lengths:
        shape = list(step.source.local_shape)
        shape[leaving.dim], shape[arriving.dim] = step.target.local_shape[leaving.dim], length
        shapes.append(shape)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        received = [local.new_empty(shape) for shape in shapes]
        return group.all_to_all(received, leaving.split(local), async_op=async_op), received

    return begin, arriving.join


def _reorder(step: RedistributeStep, held: _AxisShards, wanted: _AxisShards) -> Action:
    """Shard the dim in another way: each rank sends the rows that another one wants, and sorts what arrives."""
    group, dim = group_of(step), held.dim
    rows, own, ranks = held.rows(group.rank), wanted.rows(group.rank), range(group.size)
    sent_rows = [torch.isin(rows, wanted.rows(rank)).nonzero().flatten() for rank in ranks]
    arriving = [theirs[torch.isin(theirs, own)] for theirs in map(held.rows, ranks)]
    order = torch.cat(arriving).argsort()

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = [local.index_select(dim, at.to(local.device)) for at in sent_rows]
        received = [local.new_empty(_resized(local, dim, len(rows))) for rows in arriving]
        return group.all_to_all(received, sent, async_op=async_op), received

    return begin, lambda received: torch.cat(received, dim).index_select(dim, order.to(received[0].device))


def _even_exchange(group: Group, arriving: int, leaving: int, step: RedistributeStep) -> Action:
    """Equal shards travel as one tensor, rank by rank in front; a copy only where the dim is not the first."""
    shape, target = step.source.local_shape, step.target.local_shape
    one = (*shape[:leaving], target[leaving], *shape[leaving + 1 :])
    # what view(..., ranks, size, ...).movedim(leaving, 0) of a contiguous tensor is, in one call
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    stacked, its_strides = (group.size, *one), (target[leaving] * strides[leaving], *strides)
    exchange = exchange_fitting(group)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        sent = local.contiguous()
        sent = torch.as_strided_copy(sent, stacked, its_strides) if leaving else sent.view(stacked)
        received = torch.empty_like(sent)
        return exchange(received, sent, async_op=async_op), received

    if arriving == 0:
        return begin, lambda received: received.view(target)
    # not reshape, which leaves shards of size one in their order: what is moved must take the views that a global
    # tensor takes
    return begin, lambda received: received.movedim(0, arriving).contiguous().view(target)


def reduction_in_place(step: RedistributeStep) -> Callable[..., Any]:
    """``all_reduce(tensor, async_op=...)`` of the step, for a contiguous tensor of the layout it begins with."""
    group, op = group_of(step), _reduce_op(step)
    plain = PLAIN[op].get(step.source.dtype) if 0 not in step.source.local_shape else None
    return partial(group.all_reduce, op=op) if plain is None else all_reduce_fitting(group, plain)


def _all_reduce(step: RedistributeStep) -> Action:
    all_reduce = reduction_in_place(step)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        total = local.clone(memory_format=_CONTIGUOUS)
        return all_reduce(total, async_op=async_op), total

    return begin, None


def _reduce_scatter(step: RedistributeStep) -> Action:
    group, op, axis_shards = group_of(step), _reduce_op(step), _AxisShards(step, step.target)
    if axis_shards.is_even:
        return _even_reduce_scatter(group, axis_shards.dim, axis_shards.lengths[0], op, step)

    def begin(local: Tensor, async_op: bool) -> tuple[Any, Any]:
        shards = axis_shards.split(local)
        output = torch.empty_like(shards[group.rank])
        return group.reduce_scatter(output, shards, op, async_op=async_op), output

    return begin, None


def _even_reduce_scatter(group: Group, dim: int, length: int, op: str, step: RedistributeStep) -> Action:
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

    return begin, _back_to(dim, shape)


def _slice(step: RedistributeStep) -> Action:
    axis_shards, own = _AxisShards(step, step.target), step.target.coordinate[step.axis]
    if axis_shards.blocks > 1:
        return _local(lambda local: axis_shards.shard_of(local, own))
    ((start, size),) = axis_shards.ranges(own)
    return _local(lambda local: torch.narrow_copy(local, axis_shards.dim, start, size))


def _split(step: RedistributeStep) -> Action:
    """Replicate to Partial: one rank keeps the value, the others hold what changes nothing."""
    after = step.target.placements[step.axis]
    assert isinstance(after, Partial), f"{step!r} makes a partial"
    if after.reduce_op in ("avg", "min", "max") or step.target.coordinate[step.axis] == 0:
        return _local(torch.clone)
    return _local(torch.ones_like if after.reduce_op == "product" else torch.zeros_like)


def _pad(step: RedistributeStep) -> Action:
    """Shard to Partial: what the others hold is filled with what changes nothing."""
    axis_shards, after, own = (
        _AxisShards(step, step.source),
        step.target.placements[step.axis],
        step.source.coordinate,
    )
    assert isinstance(after, Partial), f"{step!r} makes a partial"
    starts, sizes = zip(*axis_shards.ranges(own[step.axis]), strict=True)
    neutral = 1 if after.reduce_op == "product" else 0

    def pad(local: Tensor) -> Tensor:
        joined = local.new_full(_resized(local, axis_shards.dim, axis_shards.joined), neutral)
        for start, piece in zip(starts, local.split(sizes, axis_shards.dim), strict=True):
            joined.narrow(axis_shards.dim, start, piece.shape[axis_shards.dim]).copy_(piece)
        return joined

    return _local(pad)


def _relabel(step: RedistributeStep) -> Action:
    return _local(lambda local: local)


def _local(compute: Callable[[Tensor], Tensor]) -> Action:
    """Return an action that sends nothing, and so has nothing to wait for."""
    return lambda local, async_op: (None, compute(local)), None


def _reduce_op(step: RedistributeStep) -> str:
    before = step.source.placements[step.axis]
    assert isinstance(before, Partial), f"{step!r} reduces a partial"
    return before.reduce_op


def _resized(local: Tensor, dim: int, length: int) -> list[int]:
    shape = list(local.shape)
    shape[dim] = length
    return shape


_ACTIONS: dict[str, Callable[[RedistributeStep], Action]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "relabel": _relabel,
}
