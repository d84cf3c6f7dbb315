"""Makes tensors in shared memory, and finds out that a tensor is one.

Such memory belongs to the process, not to a group: after a regroup, and in every subgroup, the same buffers are used in
place again. Each allocation is a memfd of its own, mapped for as long as a tensor uses it; peers open it through
``/proc/<pid>/fd`` when a collective first names it (see ``_regions``).

The table of allocations is the one piece of state of this module; it is per process, as file descriptors are.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from phalanx.comm.transports.shm._segment import Mapping, new_file


class User(Protocol):
    """Who has told others about an allocation."""

    def freed(self, allocation: Allocation) -> None: ...


@dataclass(eq=False)
class Allocation:
    """One piece of shared memory of this process. Its ``users`` are told once, when its last tensor is gone."""

    address: int
    nbytes: int
    fd: int
    inode: int
    serial: int
    users: weakref.WeakSet[User] = field(default_factory=weakref.WeakSet)


_serials = itertools.count(1)
_lock = threading.RLock()  # a finalizer may run inside any allocation
_addresses: list[int] = []
_allocations: list[Allocation] = []


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in fresh shared memory. ``OSError`` when there is none left."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    nbytes = count * dtype.itemsize
    fd = new_file(nbytes)
    try:
        mapping = Mapping(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    allocation = Allocation(mapping.address, nbytes, fd, os.fstat(fd).st_ino, next(_serials))
    with _lock:
        at = bisect.bisect(_addresses, allocation.address)
        _addresses.insert(at, allocation.address)
        _allocations.insert(at, allocation)
    # The tensor keeps the mapping alive, and nothing else does.
    weakref.finalize(mapping.memory, _free, allocation, os.getpid()).atexit = False
    return torch.frombuffer(mapping.memory, dtype=dtype, count=count).view(tuple(shape))


def find(address: int, nbytes: int) -> Allocation | None:
    """Return the allocation that holds these bytes, if they are in shared memory."""
    if not _addresses:
        return None
    with _lock:
        at = bisect.bisect(_addresses, address) - 1
        if at < 0:
            return None
        allocation = _allocations[at]
        return allocation if address + nbytes <= allocation.address + allocation.nbytes else None


def _free(allocation: Allocation, owner: int) -> None:
    if os.getpid() != owner:  # a forked child: the descriptor is its own copy, the table its parent's business
        os.close(allocation.fd)
        return
    with _lock:
        at = _allocations.index(allocation)
        del _allocations[at], _addresses[at]
    for user in list(allocation.users):
        user.freed(allocation)
    os.close(allocation.fd)
