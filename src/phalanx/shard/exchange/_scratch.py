"""Shared memory to pack into, kept from one exchange of a group to the next.

Ranks of one machine read it where it lies, which saves a copy. Made anew each time it would cost more than that copy,
since every page has to be made and mapped, so a group keeps its largest buffer, up to ``MAX_BYTES``, while it lives.

Invariant: a buffer has one user. ``take`` hands it over, ``give_back`` returns it when no peer reads it any more; a
buffer that never comes back (the collective failed) is freed. Module state on purpose: it belongs to groups, which know
nothing of sharding.
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phalanx.comm import Group

MIN_BYTES = 1 << 20
MAX_BYTES = 64 << 20

_lock = Lock()
_kept: WeakKeyDictionary[Group, Tensor] = WeakKeyDictionary()


def take(group: Group, nbytes: int) -> Tensor | None:
    """At least ``nbytes`` bytes that peers can read in place; None where that would not help."""
    if group.backend != "shm" or not MIN_BYTES <= nbytes <= MAX_BYTES:
        return None
    with _lock:
        kept = _kept.pop(group, None)
    if kept is not None and kept.numel() >= nbytes:
        return kept
    del kept  # before more is asked for
    try:
        return group.shared_empty((nbytes,), torch.uint8)
    except OSError:  # there is no shared memory left; private memory is as right
        return None


def give_back(group: Group, buffer: Tensor) -> None:
    with _lock:
        other = _kept.get(group)
        if other is None or other.numel() < buffer.numel():
            _kept[group] = buffer
