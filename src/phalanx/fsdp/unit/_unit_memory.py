"""Memory of a unit: the shard that a rank keeps, the flat vector while it is gathered, and buffers that are lent out.

Owns ``ShardStorage`` (one flat buffer for each unit and dtype; parameters and the collectives use it in place),
``GatheredMemory`` (fixed tensors whose memory comes and goes) and ``BufferPool``.

Tensors that autograd saved in forward refer to the gathered memory; so it always comes back at the same storage.
Everything is written through tensors that share memory with the users' but have a version counter of their own: filling
is no change of the parameters, a user's write to one is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm import Group

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
    """Return memory that the collectives of ``group`` use in place where they can."""
    if device.type == "cpu":
        return group.shared_empty((count,), dtype)
    return torch.empty(count, dtype=dtype, device=device)


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
    """A flat vector whose memory can be given back and taken again, at the same storage."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(count, dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self._nbytes = count * dtype.itemsize
        self.give_back()

    def take(self) -> None:
        if self._storage.size() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def give_back(self) -> None:
        if self._storage.size():
            self._storage.resize_(0)


class BufferPool:
    """Buffers for collectives, reused: as many as were ever in use at once, of which few are kept.

    Invariant: a buffer is lent to one user at a time; ``release`` is its last use.
    """

    KEPT = 2

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

    def clear(self) -> None:
        self._free.clear()
