"""Gathering by mapping, where the ranks are on one host: one gathered copy for all of them, to which each adds its own.

Owns ``SharedSlots`` and ``KeptUnits``, the memory of one group in which units are gathered, and ``MappedGather``.

Plan of a gather, on every rank:

1. meet: all say which unit they gather and which slots nobody on their side reads any more. The first slot that is free
   for all and large enough is taken; if there is none, all make one.
2. write: this rank's own ranges, cast if need be, straight from its storage.
3. meet again; then the slot is shown in the unit's window, a fixed range of addresses.

Whoever knows when values change (``UnitDriver.version``) need not send them twice, nor each unit by itself: all ranks
put all units one behind the other in memory that *keeps* them until the version is another one (``KeptUnits``, up to
``KEPT_BYTES``; units for which there is no room take slots). Where a unit lies follows from the order, which is the
same on all ranks, so two meetings are enough for all of them: before it all say whether they still read something of
what was kept, and behind it all have written. To gather such a unit is to show it, with no meeting.

Windows are private: a write to a gathered parameter copies the page, so that it never reaches another rank; it is gone
when the window is closed. Slots stay, as many as units were ever gathered at once: their pages are neither zeroed nor
faulted in anew. A rank that dies leaves the others in one of the two meetings, where they hear of it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.comm.transports.shm._common_file import PAGE, CommonFile, FixedWindow, open_common_file
from phalanx.fsdp.layout._unit_layout import UnitLayout
from phalanx.fsdp.unit._unit_gather import Gather
from phalanx.fsdp.unit._unit_memory import HEADER, ShardStorage
from phalanx.fsdp.unit._unit_order import check_gathered

_BITS = 62
KEPT_BYTES = 64 << 20
"""What is kept of the units of a group: one copy for all ranks together."""


class SharedSlots:
    """Files in which the units of one group are gathered, the same on all ranks; which are in use differs by rank.

    It does not hold its group, by which it is found: the group would hold itself.
    """

    def __init__(self) -> None:
        self._files: list[CommonFile] = []
        self._in_use: set[int] = set()

    def agree(self, group: Group, number: int, nbytes: int) -> int:
        """Find a slot that no rank reads, for the unit with this number; all ranks call it together."""
        count = len(self._files)
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


class KeptUnits:
    """Memory in which units of one version of a group's values lie one behind the other; the same on all ranks."""

    def __init__(self) -> None:
        self.num_shown = 0
        """How many units this rank reads in it."""
        self._file: CommonFile | None = None
        self._version: int | None = None
        self._used = 0

    def begin(self, group: Group, version: int) -> None:
        """Make room for a version, unless some rank still reads one before it. All ranks call it together."""
        self._version = version
        told = torch.empty(group.size, dtype=torch.int64)
        group.all_gather_into_tensor(told, torch.tensor([self.num_shown]))
        self._used = KEPT_BYTES if told.any() else 0

    def find_place(self, group: Group, nbytes: int) -> int | None:
        """Return where the next unit goes; None if there is no room. All ranks call it in the same order."""
        size = -(-nbytes // PAGE) * PAGE
        if self._used + size > KEPT_BYTES:
            return None
        if self._file is None:
            self._file = open_common_file(group, KEPT_BYTES)  # pages are taken when they are written
        place, self._used = self._used, self._used + size
        return place

    @property
    def version(self) -> int:
        assert self._version is not None, "a version was begun"
        return self._version

    @property
    def file(self) -> CommonFile:
        assert self._file is not None, "a place was found in it"
        return self._file


_slots: WeakKeyDictionary[Group, SharedSlots] = WeakKeyDictionary()
_kept: WeakKeyDictionary[Group, KeptUnits] = WeakKeyDictionary()


def slots_of(group: Group) -> SharedSlots:
    found = _slots.get(group)
    if found is None:
        found = _slots[group] = SharedSlots()
    return found


def kept_of(group: Group) -> KeptUnits:
    found = _kept.get(group)
    if found is None:
        found = _kept[group] = KeptUnits()
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
        self._slots, self._kept_units = slots_of(group), kept_of(group)
        self._slot: int | None = None
        self._place: int | None = None
        """Where it is kept, while it is read there."""
        self._kept: tuple[int, int] | None = None
        """Where it is kept, and of which version."""
        self._is_blank = False

    def start(self, storage: ShardStorage, number: int, *, async_op: bool) -> None:
        """Do all but showing it. ``async_op`` changes nothing: the work is this rank's own, in its own thread."""
        assert not self._is_read, "it is gathered already"
        group, nbytes = self._group, self.flat.numel() * self.flat.element_size()
        self._slot = self._slots.agree(group, number, nbytes)
        self._write(storage, self._slots.file(self._slot).bytes[:nbytes])
        group.barrier()

    def keep(self, storage: ShardStorage) -> bool:
        kept, nbytes = self._kept_units, self.flat.numel() * self.flat.element_size()
        self._kept = None
        place = kept.find_place(self._group, nbytes)
        if place is None:
            return False
        self._write(storage, kept.file.bytes[place : place + nbytes])
        self._kept = (place, kept.version)
        return True

    def _write(self, storage: ShardStorage, there: Tensor) -> None:
        """Put what this rank owns to its places."""
        layout, rank, flat = self._layout, self._group.rank, there.view(self.flat.dtype)
        for begin, end in layout.owned[rank]:
            start, stop = layout.local_span(rank, begin, end)
            flat[begin:end].copy_(storage.buffer[HEADER + start : HEADER + stop])

    def is_kept(self, version: int) -> bool:
        return self._kept is not None and self._kept[1] == version

    def start_again(self) -> None:
        assert self._kept is not None, "it is kept"
        assert not self._is_read, "it is gathered already"
        self._place = self._kept[0]
        self._kept_units.num_shown += 1

    @property
    def _is_read(self) -> bool:
        return self._slot is not None or self._place is not None

    def finish(self) -> None:
        if self._place is not None:
            self._memory.window.show(self._kept_units.file, self._place)
            return
        assert self._slot is not None, "it was started"
        self._memory.window.show(self._slots.file(self._slot))

    def serve(self, storage: ShardStorage, number: int) -> None:
        self.start(storage, number, async_op=False)
        self._let_go()

    def blank(self) -> None:
        self._memory.window.show_zeros()
        self._is_blank = True

    def release(self) -> None:
        if self._is_read or self._is_blank:
            self._memory.window.hide()
        self._let_go()

    def _let_go(self) -> None:
        if self._slot is not None:
            self._slots.give_back(self._slot)
        if self._place is not None:
            self._kept_units.num_shown -= 1
        self._slot, self._place, self._is_blank = None, None, False
