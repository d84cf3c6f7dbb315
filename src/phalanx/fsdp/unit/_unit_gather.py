"""Gathering: from the ranges that each rank owns to the flat vector on every rank.

Owns the interface that a unit sees (``Gather``) and the way that works with every transport (``CopyGather``): one
all-gather of even parts, then strided copies to their places. ``_mapped_gather.py`` has the way of ranks on one host.

Phases of one gather: ``start`` (send; may return before the others have sent), ``finish`` (the flat vector is there,
the unit's number was compared), ``release`` (its memory is given back). A gather that was started is finished.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import foreach_copy_
from phalanx.comm import Group
from phalanx.fsdp._policies import AllGather
from phalanx.fsdp.layout._packing import Strided, copies, longest_part
from phalanx.fsdp.layout._unit_layout import UnitLayout, aligned
from phalanx.fsdp.unit._unit_memory import HEADER, BufferPool, GatheredMemory, ShardStorage
from phalanx.fsdp.unit._unit_order import agree, check_gathered, write_number


def part_length(layout: UnitLayout) -> int:
    """Return how many elements every rank's storage has room for, so that parts are even; without the header."""
    return aligned(longest_part(layout.held))


class Gather(ABC):
    """Makes ``flat`` of all ranks' storages. One for each unit and dtype."""

    flat: Tensor
    """The flat vector; its memory is there between ``finish`` and ``release``."""

    @abstractmethod
    def start(self, storage: ShardStorage, number: int, *, async_op: bool) -> None: ...

    def keep(self, storage: ShardStorage) -> bool:
        """Put this rank's part where all read it until values change, if there is room; alike on all ranks.

        Whoever calls it has the ranks meet before and behind it, once for all units.
        """
        return False

    def is_kept(self, version: int) -> bool:
        """Return whether the values of this version are there for all ranks."""
        return False

    def start_again(self) -> None:
        """Begin with what is kept, without the other ranks."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing")

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def release(self) -> None: ...

    @abstractmethod
    def serve(self, storage: ShardStorage, number: int) -> None:
        """Do this rank's part of a gather whose result only others use."""

    @abstractmethod
    def blank(self) -> None:
        """Show zeros: the ranks that own the rest are gone, and what is computed will be thrown away."""


class CopyGather(Gather):
    """One all-gather and a copy; works everywhere."""

    def __init__(self, group: Group, layout: UnitLayout, memory: GatheredMemory, pool: BufferPool) -> None:
        self._group, self._layout, self._memory, self._pool = group, layout, memory, pool
        self.flat = memory.flat
        self._dtype, self._device = self.flat.dtype, self.flat.device
        self._part = HEADER + aligned(longest_part(layout.owned))
        self._moves = copies(layout.owned, self._part, 0, layout.length, HEADER)
        self._owned = [layout.local_span(group.rank, begin, end) for begin, end in layout.owned[group.rank]]
        self._pending: tuple[Any, Tensor, Tensor | None, int] | None = None
        self.comm: AllGather | None = None

    def start(self, storage: ShardStorage, number: int, *, async_op: bool) -> None:
        assert self._pending is None, "a gather is under way"
        group = self._group
        agree(group, "gathers", number, group.size * self._part * self._dtype.itemsize)
        sent, borrowed = self._sent(storage)
        write_number(sent[:HEADER], number)
        count = group.size * self._part
        if group.size == 1 and self.comm is None:
            self._pending = (None, sent, borrowed, number)  # nothing to send: the copy to its places is all
            return
        if self.comm is not None:
            received = self.comm.allocate((count,), dtype=self._dtype, device=self._device)
            work = self.comm(received, sent, group, async_op)
        else:
            received = self._pool.acquire(group, count, self._dtype, self._device)
            work = group.all_gather_into_tensor(received[:count], sent, async_op=async_op)
        self._pending = (work, received, borrowed, number)

    def _sent(self, storage: ShardStorage) -> tuple[Tensor, Tensor | None]:
        """Return what this rank sends, and the buffer that it borrowed for that: its storage itself, if it fits."""
        buffer = storage.buffer
        fits = buffer.dtype == self._dtype and buffer.device == self._device and buffer.numel() == self._part
        if fits and not self._layout.has_copies:
            return buffer, None
        borrowed = self._pool.acquire(self._group, self._part, self._dtype, self._device)
        sent, at = borrowed[: self._part], HEADER
        for start, stop in self._owned:
            sent[at : at + stop - start].copy_(buffer[HEADER + start : HEADER + stop])
            at += stop - start
        return sent, borrowed

    def finish(self) -> None:
        assert self._pending is not None, "no gather is under way"
        received, borrowed = self._received()
        self._memory.take()
        foreach_copy_(
            [runs(self.flat, move.flat, move.flat_stride, move) for move in self._moves],
            [runs(received, move.packed, move.packed_stride, move) for move in self._moves],
        )
        self._give_back(received, borrowed)

    def serve(self, storage: ShardStorage, number: int) -> None:
        self.start(storage, number, async_op=False)
        self._give_back(*self._received())

    def blank(self) -> None:
        self._pending = None  # what is under way may still write to its buffer, which is not used again
        self._memory.take()
        self.flat.zero_()

    def _received(self) -> tuple[Tensor, Tensor | None]:
        """Wait for what the others sent and compare the unit's number; also the buffer that was borrowed to send."""
        assert self._pending is not None, "a gather was started"
        (work, received, borrowed, number), self._pending = self._pending, None
        group, part = self._group, self._part
        if work is not None:
            work.wait()
        parts = received[: group.size * part].view(group.size, part)
        check_gathered(group, number, parts[:, :HEADER].view(torch.int64)[:, 0].tolist())
        return received, borrowed

    def _give_back(self, received: Tensor, borrowed: Tensor | None) -> None:
        if self.comm is None and self._group.size > 1:
            self._pool.release(received)
        if borrowed is not None:
            self._pool.release(borrowed)

    def release(self) -> None:
        self._memory.give_back()

    @property
    def is_there(self) -> bool:
        return self._memory.is_there


def runs(memory: Tensor, start: int, stride: int, move: Strided) -> Tensor:
    """Return the elements that one copy reads or writes, one run a row."""
    return memory.as_strided((move.times, move.count), (stride, 1), memory.storage_offset() + start)
