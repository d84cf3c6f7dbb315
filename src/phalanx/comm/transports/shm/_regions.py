"""Names this rank's shared tensors to the collectives of one group, and maps the peers'.

A rank names the memory of its tensor in the call record (``RegionAddress``). A number in its table of the segment says
that it still exists; when the last tensor on it is gone the entry becomes 0 and peers drop their mappings the next time
they map something new, so that memory is given back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm import _shared_tensors
from phalanx.comm.transports.shm._segment import Mapping, Segment, open_file_of
from phalanx.comm.transports.shm._shared_tensors import Allocation
from phalanx.errors import CommError


class RegionAddress(NamedTuple):
    """Where a tensor lies in its rank's shared memory, as words of the call record. ``entry`` 0: nowhere."""

    entry: int
    serial: int
    fd: int
    inode: int
    nbytes: int
    offset: int


NOWHERE = RegionAddress(0, 0, 0, 0, 0, 0)


class Regions:
    """The shared memory that one group's collectives have met so far."""

    def __init__(self, segment: Segment, pids: dict[int, int]) -> None:
        layout = segment.layout
        self._words = segment.words
        self._pids = pids
        self._tables = [layout.block(rank) + layout.regions_word for rank in range(layout.size)]
        self._rank = segment.rank
        self._entries: dict[Allocation, int] = {}
        self._mapped: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def place(self, address: int, nbytes: int) -> RegionAddress:
        """Name these bytes of this process, if they are in shared memory and the table has room."""
        allocation = _shared_tensors.find(address, nbytes)
        if allocation is None:
            return NOWHERE
        entry = self._entries.get(allocation)
        if entry is None:
            entry = self._enter(allocation)
            if not entry:
                return NOWHERE
        a = allocation
        return RegionAddress(entry, a.serial, a.fd, a.inode & (1 << 62) - 1, a.nbytes, address - a.address)

    def _enter(self, allocation: Allocation) -> int:
        used = set(self._entries.values())
        entry = next((e for e in range(1, L.REGIONS) if e not in used), 0)
        if entry:
            self._words[self._tables[self._rank] + entry] = allocation.serial
            self._entries[allocation] = entry
            allocation.users.add(self)
        return entry

    def freed(self, allocation: Allocation) -> None:
        entry = self._entries.pop(allocation, 0)
        if entry:
            self._words[self._tables[self._rank] + entry] = 0

    def view(self, rank: int, place: RegionAddress, dtype: torch.dtype, nbytes: int, offset: int = 0) -> Tensor:
        """``nbytes`` of a peer's tensor from byte ``offset`` of it, as a flat tensor."""
        key = (rank, place.entry)
        found = self._mapped.get(key)
        if found is None or found[0] != place.serial:
            self._sweep()
            found = self._mapped[key] = (place.serial, self._map(rank, place))
        start = place.offset + offset
        return found[1][start : start + nbytes].view(dtype)

    def _map(self, rank: int, place: RegionAddress) -> Tensor:
        try:
            fd = open_file_of(self._pids[rank], place.fd)
            try:
                if os.fstat(fd).st_ino & (1 << 62) - 1 != place.inode:
                    raise OSError(f"descriptor {place.fd} is something else by now")
                memory = Mapping(fd, place.nbytes).memory
            finally:
                os.close(fd)
        except OSError as error:
            raise CommError(
                f"rank {self._rank} cannot map a shared tensor of rank {rank} (pid {self._pids[rank]}): {error}; "
                "keep shared tensors alive until their collective is over on every rank"
            ) from error
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _sweep(self) -> None:
        for (rank, entry), (serial, _) in list(self._mapped.items()):
            if self._words[self._tables[rank] + entry] != serial:
                del self._mapped[rank, entry]

    def close(self) -> None:
        for allocation in self._entries:
            allocation.users.discard(self)
        self._entries.clear()
        self._mapped.clear()


def span(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Address and bytes of tensors that lie one behind the other in memory, as the parts of one do; else None."""
    parts = [tensor for tensor in tensors if tensor.numel()]  # an empty tensor has no address
    start = end = parts[0].data_ptr() if parts else 0
    for tensor in parts:
        if tensor.data_ptr() != end:
            return None
        end += tensor.numel() * tensor.element_size()
    return start, end - start
