"""Memory of a unit: the shard that a rank keeps, the flat vector while it is gathered, and buffers that are lent out.

Owns ``ShardStorage`` (one flat buffer for each unit and dtype; parameters and the collectives use it in place),
``GatheredMemory`` (fixed tensors whose memory comes and goes) and ``BufferPool``.

Tensors that autograd saved in forward refer to the gathered memory; so it always comes back at the same storage.
Everything is written through tensors that share memory with the users' but have a version counter of their own: filling
is no change of the parameters, a user's write to one is.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx.comm import Group
from phalanx.comm.transports.shm._common_file import FixedWindow

_MAPPED_BYTES = 1 << 20
HEADER = 64
"""Elements in front of what a rank sends, for the number of the unit."""


def alias(memory: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None) -> Tensor:
    """Return a tensor on the memory of ``memory``, from element ``offset`` of it, that is no view of it."""
    made = torch.empty(0, dtype=memory.dtype, device=memory.device)
    where = memory.storage_offset() + offset
    strides = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
    with torch.no_grad():
        return made.set_(memory.untyped_storage(), where, tuple(shape), strides)


def new_buffer(group: Group, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that the collectives of ``group`` use in place where they can.

    Large memory of this process alone is mapped for itself. From the allocator's heap, where units and gradients come
    and go in turn, pieces of it would stay in use between others: more than half of what a process held.
    """
    if not is_host(device):
        return torch.empty(count, dtype=dtype, device=device)
    nbytes = count * dtype.itemsize
    if group.backend == "shm" or nbytes < _MAPPED_BYTES:
        return group.shared_empty((count,), dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count)


class ShardStorage:
    """What this rank holds of one dtype of a unit, behind a header, as it is sent."""

    def __init__(self, group: Group, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = new_buffer(group, HEADER + count, dtype, device)
        self.buffer.zero_()
        self.count = count

    def alias(self, offset: int, shape: Sequence[int]) -> Tensor:
        return alias(self.buffer, HEADER + offset, shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    def address(self, offset: int) -> int:
        return self.buffer.data_ptr() + (HEADER + offset) * self.buffer.element_size()


class GatheredMemory:
    """A flat vector whose memory can be given back and taken again, at the same storage.

    In the host's memory it is a window of fixed addresses (Linux): whoever kept a view and reads it in between gets
    NaN. On other devices and systems the storage is emptied.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = count * dtype.itemsize
        is_window = sys.platform == "linux" and is_host(device) and count > 0
        self._window = FixedWindow(self._nbytes) if is_window else None
        if self._window is None:
            self.flat = torch.empty(count, dtype=dtype, device=device)
            self.flat.untyped_storage().resize_(0)
        else:
            self.flat = self._window.tensor(count, dtype)
        self.is_there = False

    def take(self) -> None:
        if not self.is_there:
            self.is_there = True
            if self._window is None:
                self.flat.untyped_storage().resize_(self._nbytes)
            else:
                self._window.show()

    def give_back(self) -> None:
        if self.is_there:
            self.is_there = False
            if self._window is None:
                self.flat.untyped_storage().resize_(0)
            else:
                self._window.hide()


class BufferPool:
    """Buffers for collectives, reused: as many as were ever in use at once, of which few are kept.

    Invariant: a buffer is lent to one user at a time; ``release`` is its last use.
    """

    KEPT = 3

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def acquire(self, group: Group, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get((dtype, device), [])
        fitting = [buffer for buffer in free if buffer.numel() >= count]
        if not fitting:
            return new_buffer(group, count, dtype, device)
        best = min(fitting, key=Tensor.numel)
        self._free[dtype, device] = [buffer for buffer in free if buffer is not best]
        return best

    def release(self, buffer: Tensor) -> None:
        free = self._free.setdefault((buffer.dtype, buffer.device), [])
        free.append(buffer)
        free.sort(key=Tensor.numel, reverse=True)
        del free[self.KEPT :]


_pools: WeakKeyDictionary[Group, BufferPool] = WeakKeyDictionary()


def hand_on(old: Group, new: Group) -> None:
    """Give the buffers that nobody uses of one group to the one that takes its place: they are there, new ones would
    have to be cleared and mapped."""
    found = _pools.get(old)
    if found is not None and new not in _pools and old.backend == new.backend:
        _pools[new] = found
        del _pools[old]


def pool_of(group: Group) -> BufferPool:
    """Return the buffers of all units of a group, which are gathered and reduced in turn."""
    found = _pools.get(group)
    if found is None:
        found = _pools[group] = BufferPool()
    return found
