"""Reducing: from whole gradients on every rank to the sum's ranges on the ranks that hold them.

Owns ``GradientSum``, one unit's (and dtype's) gradients between their arrival and the shards' ``.grad``. A gradient is
copied, as soon as autograd has it, to its places in the packed parts of one reduce-scatter, cast to the dtype of the
reduction; nothing else keeps it. Parts begin with a header: the bits of the unit's number, then for each parameter
whether any rank had a gradient for it, so that one that nobody used keeps ``grad`` None.

Phases: ``add`` (any number of times, over any number of backward passes), ``start``, ``sum_replicas`` (where there is
something else to do meanwhile), ``finish``; ``drop`` forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx.comm import Group
from phalanx.fsdp._policies import ReduceScatter
from phalanx.fsdp.layout._packing import Strided, copies, longest_part
from phalanx.fsdp.layout._unit_layout import Range, UnitLayout, aligned
from phalanx.fsdp.unit._unit_gather import runs
from phalanx.fsdp.unit._unit_memory import BufferPool, pool_of
from phalanx.fsdp.unit._unit_order import DEEDS, TAG_BITS, agree, check_reduced, write_bits


@dataclass(frozen=True)
class ReducePlan:
    """Where gradients of the trainable parameters go."""

    header: int
    part: int
    moves: tuple[tuple[Strided, ...], ...]
    """For each parameter, from its gradient to the packed parts."""
    spans: tuple[Range, ...]
    """For each parameter, where this rank's piece lies in what it receives, without the header."""


def reduce_plan(layout: UnitLayout, rank: int, extents: Sequence[Range]) -> ReducePlan:
    """Plan the reduction of the parameters at ``extents`` of the flat vector; other elements do not travel."""
    reduced = layout.restricted(extents)
    header = aligned(TAG_BITS + len(extents))
    part = header + aligned(longest_part(reduced.held))
    return ReducePlan(
        header,
        part,
        tuple(copies(reduced.held, part, begin, end, header) for begin, end in extents),
        tuple(reduced.local_span(rank, begin, end) for begin, end in extents),
    )


def divide_factors(factor: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split the division by ``factor`` into one before and one after the sum.

    float16 overflows early, so half of it (a power of two, exact) comes before; the others divide what they received.

    >>> divide_factors(8, torch.float16), divide_factors(8, torch.float32)
    ((4.0, 2.0), (1.0, 8))
    """
    if dtype is not torch.float16:
        return 1.0, factor
    before = 1.0
    while factor / before > before:
        before *= 2
    return before, factor / before


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Whom a reduction is shared with, and how: what a unit's settings say at the moment."""

    shard: Group
    replicate: Group | None
    factor: float
    all_reduce: bool = True
    comm: ReduceScatter | None = None
    hook: Callable[[Tensor], None] | None = None


def place(grad: Tensor, packed: Tensor, moves: Sequence[Strided], *, adds: bool) -> None:
    """Put a parameter's gradient into packed parts, or add it to what is there."""
    source = grad.reshape(-1)
    for move in moves:
        there = runs(packed, move.packed, move.packed_stride, move)
        here = runs(source, move.flat, move.flat_stride, move)
        if adds:
            there.add_(here)
        else:
            there.copy_(here)


def _shares(to: Destination, device: torch.device) -> bool:
    """Return whether the replicas add up in memory of their own: of three on, measured, it pays for the copy."""
    among = to.replicate if to.all_reduce and to.comm is None else None
    return among is not None and among.size > 2 and among.backend == "shm" and is_host(device)


class GradientSum:
    """Gradients of one unit and dtype on their way."""

    def __init__(
        self, number: int, plan: ReducePlan, dtype: torch.dtype, device: torch.device, pool: BufferPool
    ) -> None:
        self.plan = plan
        self._number, self._dtype, self._device, self._pool = number, dtype, device, pool
        self._packed: Tensor | None = None
        self._arrived: set[int] = set()
        self._partial: Tensor | None = None
        self._pending: tuple[Any, Tensor, Tensor, Destination] | None = None
        self._summed: tuple[Any, Tensor, Destination] | None = None
        """This rank's part of the sum, maybe on its way among the replicas."""
        self._lent: Tensor | None = None
        """The replicas' memory that the part is in."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return self._packed is None

    def add(self, group: Group, index: int, grad: Tensor) -> None:
        """Put a gradient in its places; the second of one parameter is added to the first."""
        plan = self.plan
        if self._packed is None:
            self._packed = self._pool.acquire(group, group.size * plan.part, self._dtype, self._device)
        place(grad, self._packed, plan.moves[index], adds=index in self._arrived)
        self._arrived.add(index)

    def start(self, to: Destination, *, async_op: bool) -> None:
        """Send what has arrived; parameters without a gradient count as zeros."""
        assert not self.is_under_way, "a reduction is under way"
        plan, group = self.plan, to.shard
        agree(group, "reduces", self._number, group.size * plan.part * self._dtype.itemsize)
        if self._packed is None:
            self._packed = self._pool.acquire(group, group.size * plan.part, self._dtype, self._device)
        packed = self._packed[: group.size * plan.part]
        for index, moves in enumerate(plan.moves):
            if index not in self._arrived:
                for move in moves:
                    runs(packed, move.packed, move.packed_stride, move).zero_()
        before, _ = divide_factors(to.factor, self._dtype)
        if before != 1:
            packed.div_(before)
        headers = packed.view(group.size, plan.part)[:, : plan.header]
        headers.zero_()
        write_bits(headers[0], self._number)
        if self._arrived:
            headers[0][TAG_BITS + torch.tensor(sorted(self._arrived))] = 1
        headers[1:] = headers[0]
        if to.comm is not None:
            received = to.comm.allocate((plan.part,), dtype=self._dtype, device=self._device)
            work = to.comm(received, packed, group, "sum", async_op)
        else:
            received = self._room_for_part(to)
            work = group.reduce_scatter_tensor(received, packed, async_op=async_op)
        self._pending = (work, received, self._packed, to)
        self._packed = None
        self._arrived = set()

    def _room_for_part(self, to: Destination) -> Tensor:
        """Return memory for this rank's part of the sum, which becomes gradients, or is copied to them where several
        replicas of one host add up sooner in memory that they share."""
        if not _shares(to, self._device):
            return torch.empty(self.plan.part, dtype=self._dtype, device=self._device)
        assert to.replicate is not None, "it shares"
        lent = pool_of(to.replicate).acquire(to.replicate, self.plan.part, self._dtype, self._device)
        self._lent = lent
        return lent[: self.plan.part]

    @property
    def is_under_way(self) -> bool:
        return self._pending is not None or self._summed is not None

    def sum_replicas(self) -> bool:
        """Wait for the sum over the shard group and begin that over the replicas; whether there is one."""
        assert self._pending is not None, "no reduction is under way"
        (work, received, sent, to), self._pending = self._pending, None
        if work is not None:
            work.wait()
        self._pool.release(sent)
        check_reduced(to.shard, self._number, received[:TAG_BITS].tolist(), int(to.shard.size))
        if self._partial is not None:
            received[TAG_BITS:] += self._partial[TAG_BITS:]
            self._partial = None
        among = to.replicate if to.all_reduce else None
        if among is not None:
            agree(among, DEEDS[2], self._number, received.nbytes, to.shard)
        self._summed = (None if among is None else among.all_reduce(received, async_op=True), received, to)
        return among is not None

    def finish(self) -> list[Tensor | None] | None:
        """Return each parameter's piece of the gradient (None: nobody used it); None if replicas are to come later."""
        if self._summed is None:
            self.sum_replicas()
        assert self._summed is not None, "just made"
        (work, received, to), self._summed = self._summed, None
        if to.replicate is not None:
            if work is None:
                self._partial = received
                return None
            work.wait()
            num_ranks = int(to.shard.size) * to.replicate.size
            check_reduced(to.replicate, self._number, received[:TAG_BITS].tolist(), num_ranks, to.shard)
        if self._lent is not None and to.replicate is not None:
            lent, self._lent, received = self._lent, None, received.clone()
            pool_of(to.replicate).release(lent)
        return self._pieces(received, to)

    def _pieces(self, received: Tensor, to: Destination) -> list[Tensor | None]:
        plan = self.plan
        data = received[plan.header :]
        _, after = divide_factors(to.factor, self._dtype)
        if after != 1:
            data.div_(after)
        if to.hook is not None:
            to.hook(data)
        used = received[TAG_BITS : TAG_BITS + len(plan.spans)].tolist()
        return [data[a:b] if flag else None for (a, b), flag in zip(plan.spans, used, strict=True)]

    def drop(self) -> None:
        """Forget everything that has arrived. What is under way may still be written to: its buffer is not reused."""
        self._packed = self._partial = self._pending = self._summed = self._lent = None
        self._arrived.clear()
