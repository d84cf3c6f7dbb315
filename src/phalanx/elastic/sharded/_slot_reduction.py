"""Brings the gradients of one section from the workers that computed a wave's slots to the owners, who sum them.

The counterpart of ``fsdp.unit._gradient_sum`` in a job: in place of a reduce-scatter an all-to-all of the ranges that
each worker owns, so that owners add the slots up in their order (``SlotSums``), not in that of the ranks.

Phases, once a wave: ``add`` (gradients are copied to their places in the parts for the owners as autograd delivers
them; those of later parts of a slot's batch are added), ``start`` (the parts go out), ``finish`` (the owner pushes the
wave's slots). Which workers send something follows from the step's samples and is known to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.elastic.sharded._slot_sums import SlotSums
from phalanx.fsdp.layout._packing import Strided, copies_at
from phalanx.fsdp.layout._unit_layout import Range, UnitLayout, aligned, num_elements
from phalanx.fsdp.unit._gradient_sum import Destination, place
from phalanx.fsdp.unit._unit_gather import runs
from phalanx.fsdp.unit._unit_memory import HEADER, BufferPool
from phalanx.fsdp.unit._unit_order import check_sent, write_number


@dataclass(frozen=True)
class Wave:
    """One round of slots, of which some workers compute one each."""

    first_slot: int
    ranks: tuple[int, ...]
    """Who computes them, in their order."""
    senders: tuple[int, ...]
    """The ranks whose slot has samples."""

    @property
    def end(self) -> int:
        """The slot with which the next wave begins."""
        return self.first_slot + len(self.ranks)


@dataclass(frozen=True)
class OwnerPlan:
    """Where the gradients of some parameters go: one part for each owner, behind a header."""

    places: tuple[int, ...]
    """Where each part begins in the packed buffer; the last number is its length."""
    counts: tuple[int, ...]
    """Elements of each part without the header."""
    owned: tuple[Range, ...]
    """What this rank owns of these parameters."""
    moves: tuple[tuple[Strided, ...], ...]
    """For each parameter, from its gradient to the packed parts."""


def owner_plan(layout: UnitLayout, rank: int, extents: Sequence[Range]) -> OwnerPlan:
    """Plan for the parameters at ``extents`` of the flat vector."""
    owned = layout.restricted(extents).owned
    counts = tuple(map(num_elements, owned))
    places = [0]
    for count in counts:
        places.append(places[-1] + HEADER + aligned(count))
    begins = [place + HEADER for place in places[:-1]]
    moves = tuple(copies_at(owned, begins, begin, end) for begin, end in extents)
    return OwnerPlan(tuple(places), counts, owned[rank], moves)


class Messages(Protocol):
    """Looks at what travels between workers."""

    def sent(self, tensors: Sequence[Tensor], rank: int) -> None: ...

    def received(self, tensors: Sequence[Tensor], rank: int) -> None: ...


class MessageKinds(Protocol):
    """Looks at what travels, by what it is."""

    def of(self, kind: str) -> Messages: ...


class SlotReduction:
    """Gradients of one section on their way to their owners."""

    def __init__(
        self, number: int, plan: OwnerPlan, sums: SlotSums, dtype: torch.dtype, device: torch.device, pool: BufferPool
    ) -> None:
        self.plan, self.sums = plan, sums
        self.wave: Wave | None = None
        self._number, self._dtype, self._device, self._pool = number, dtype, device, pool
        self.is_muted = False
        self.watch: Callable[[int, Tensor], None] | None = None
        """Whom to show the gradients that come, by the number of their parameter, also muted ones."""
        self.look: Callable[[int, Tensor], None] | None = None
        """As ``watch``, for those that count only."""
        self.messages: Messages | None = None
        """Whom to show what is sent and received."""
        self._packed: Tensor | None = None
        self._arrived: set[int] = set()
        self.used: set[int] = set()
        """The parameters that had a gradient in this worker's slot of the wave."""
        self._pending: tuple[Any, Group, Tensor | None, list[Tensor], Tensor | None, Wave] | None = None

    @property
    def is_empty(self) -> bool:
        return self._packed is None

    def add(self, group: Group, index: int, grad: Tensor) -> None:
        """Put a gradient in its places; the second of one parameter is added to the first."""
        if self.watch is not None:
            self.watch(index, grad)
        if self.is_muted:
            return
        if self.look is not None:
            self.look(index, grad)
        if self._packed is None:
            self._packed = self._pool.acquire(group, self.plan.places[-1], self._dtype, self._device)
        place(grad, self._packed, self.plan.moves[index], adds=index in self._arrived)
        self._arrived.add(index)
        self.used.add(index)

    def start(self, to: Destination, *, async_op: bool) -> None:
        """Send the wave's gradients to their owners."""
        wave, group = self.wave, to.shard
        assert wave is not None, "a wave runs"
        assert self._pending is None, "its reduction is not under way"
        sends = group.rank in wave.senders
        sent = self._parts(group) if sends else [self._nothing()] * group.size
        if group.size == 1:  # what it sends it has
            self._pending = (None, group, None, sent, self._packed, wave)
            self._packed, self._arrived = None, set()
            return
        length = HEADER + self.plan.counts[group.rank]
        room = self._pool.acquire(group, len(wave.senders) * aligned(length), self._dtype, self._device)
        received = [
            room[wave.senders.index(rank) * aligned(length) :][:length] if rank in wave.senders else self._nothing()
            for rank in range(group.size)
        ]
        if self.messages is not None:
            self.messages.sent(sent, group.rank)
        work = group.all_to_all(received, sent, async_op=async_op)
        self._pending = (work, group, room, received, self._packed, wave)
        self._packed = None
        self._arrived = set()

    def _parts(self, group: Group) -> list[Tensor]:
        plan = self.plan
        if self._packed is None:
            self._packed = self._pool.acquire(group, plan.places[-1], self._dtype, self._device)
        for index, moves in enumerate(plan.moves):
            if index not in self._arrived:
                for move in moves:
                    runs(self._packed, move.packed, move.packed_stride, move).zero_()
        parts = []
        for rank in range(group.size):
            begin = plan.places[rank]
            write_number(self._packed[begin : begin + HEADER], self._number)
            parts.append(self._packed[begin : begin + HEADER + plan.counts[rank]])
        return parts

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def finish(self) -> None:
        """Push the wave's slots. Shards get no gradient from it: the step's sum is known when all slots are in."""
        assert self._pending is not None, "a reduction is under way"
        (work, group, room, received, packed, wave), self._pending = self._pending, None
        if work is not None:
            work.wait()
            if self.messages is not None:
                self.messages.received(received, group.rank)
        for rank in wave.senders:
            check_sent(group, "reduces", self._number, rank, int(received[rank][:HEADER].view(torch.int64)[0]))
        for slot, rank in enumerate(wave.ranks, wave.first_slot):
            self.sums.push(slot, received[rank][HEADER:] if rank in wave.senders else None)
        if room is not None:
            self._pool.release(room)
        if packed is not None:
            self._pool.release(packed)

    def drop(self) -> None:
        """Forget everything that has arrived. What is under way may still be written to: its buffer is not reused."""
        self._packed = self._pending = None
        self._arrived.clear()
        self.used.clear()
