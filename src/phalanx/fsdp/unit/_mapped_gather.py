"""Gathering by mapping, where the ranks are on one host: one gathered copy for all of them, to which each adds its own.

Owns ``SharedSlots``, the memory of one group in which units are gathered, and ``MappedGather``.

Plan of a gather, on every rank:

1. meet: all say which unit they gather and which slots nobody on their side reads any more. The first slot that is free
   for all and large enough is taken; if there is none, all make one.
2. write: this rank's own ranges, cast if need be, straight from its storage.
3. meet again; then the slot is shown in the unit's window, a fixed range of addresses.

Windows are private: a write to a gathered parameter copies the page, so that it never reaches another rank; it is gone
when the window is closed. Slots stay, as many as units were ever gathered at once: their pages are neither zeroed nor
faulted in anew. A rank that dies leaves the others in one of the two meetings, where they hear of it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from phalanx.comm import Group
from phalanx.comm.transports.shm._common_file import CommonFile, FixedWindow, open_common_file
from phalanx.fsdp.layout._unit_layout import UnitLayout
from phalanx.fsdp.unit._unit_gather import Gather
from phalanx.fsdp.unit._unit_memory import HEADER, ShardStorage
from phalanx.fsdp.unit._unit_order import check_gathered

_BITS = 62


class SharedSlots:
    """Files in which the units of one group are gathered, the same on all ranks; which are in use differs by rank."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._files: list[CommonFile] = []
        self._in_use: set[int] = set()

    def agree(self, number: int, nbytes: int) -> int:
        """Find a slot that no rank reads, for the unit with this number; all ranks call it together."""
        group, count = self._group, len(self._files)
        words = 1 + -(-count // _BITS)
        own = torch.tensor([number, *self._free(count)], dtype=torch.int64)
        told = torch.empty(group.size * words, dtype=torch.int64)
        group.all_gather_into_tensor(told, own)
        rows = told.view(group.size, words).tolist()
        check_gathered(group, number, [row[0] for row in rows])
        for slot, file in enumerate(self._files):
            word, bit = 1 + slot // _BITS, slot % _BITS
            if file.nbytes >= nbytes and all(row[word] >> bit & 1 for row in rows):
                self._in_use.add(slot)
                return slot
        self._files.append(open_common_file(group, nbytes))
        self._in_use.add(count)
        return count

    def _free(self, count: int) -> list[int]:
        masks = [0] * -(-count // _BITS)
        for slot in range(count):
            if slot not in self._in_use:
                masks[slot // _BITS] |= 1 << slot % _BITS
        return masks

    def file(self, slot: int) -> CommonFile:
        return self._files[slot]

    def give_back(self, slot: int) -> None:
        self._in_use.discard(slot)


_slots: WeakKeyDictionary[Group, SharedSlots] = WeakKeyDictionary()


def slots_of(group: Group) -> SharedSlots:
    found = _slots.get(group)
    if found is None:
        found = _slots[group] = SharedSlots(group)
    return found


class MappedMemory:
    """The flat vector of a unit in a window: ``flat`` is at one address whenever it is shown."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.window = FixedWindow(count * dtype.itemsize)
        self.flat = self.window.tensor(count, dtype)


class MappedGather(Gather):
    """One gathered copy on the host; each rank writes what it owns."""

    def __init__(self, group: Group, layout: UnitLayout, memory: MappedMemory) -> None:
        self._group, self._layout, self._memory = group, layout, memory
        self.flat = memory.flat
        self._slots = slots_of(group)
        self._slot: int | None = None
        self._is_blank = False

    def start(self, storage: ShardStorage, number: int, *, async_op: bool) -> None:
        """Do all but showing it. ``async_op`` changes nothing: the work is this rank's own, in its own thread."""
        assert self._slot is None, "it is gathered already"
        layout, rank, flat = self._layout, self._group.rank, self.flat
        self._slot = self._slots.agree(number, flat.numel() * flat.element_size())
        there = self._slots.file(self._slot).bytes[: flat.numel() * flat.element_size()].view(flat.dtype)
        for begin, end in layout.owned[rank]:
            start, stop = layout.local_span(rank, begin, end)
            there[begin:end].copy_(storage.buffer[HEADER + start : HEADER + stop])
        self._group.barrier()

    def finish(self) -> None:
        assert self._slot is not None, "it was started"
        self._memory.window.show(self._slots.file(self._slot))

    def serve(self, storage: ShardStorage, number: int) -> None:
        self.start(storage, number, async_op=False)
        self.release()

    def blank(self) -> None:
        self._memory.window.show_zeros()
        self._is_blank = True

    def release(self) -> None:
        if self._slot is not None or self._is_blank:
            self._memory.window.hide()
        if self._slot is not None:
            self._slots.give_back(self._slot)
        self._slot, self._is_blank = None, False
