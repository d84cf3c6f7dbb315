"""Encodes values as they lie in torch's TCPStore and in the files of a FileStore: the value, then a trailer.

The trailer makes every write distinct and names the lease that the key is bound to. Why distinct:
TCPStore's compare-and-set answers with the value it now holds, so two clients that write the same bytes
could both believe they won; and a watch that compares snapshots must see a key that was rewritten with the
same bytes. Why at the end: the server reads a counter from the leading digits, so its ``add`` works on a
value that ``set`` wrote. What the server's ``add`` writes has no trailer: digits only. It cannot remove an
expired key atomically (there is no compare-and-delete), so such a key is swapped for a *tombstone*: reads
as absent, counts as 0.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass

_TRAILER = struct.Struct(">cQ8sQ")  # mark, lease (0: none), client, number of the write
_MARK = b"\x00"
_NO_LEASE = 0
_TOMBSTONE = 2**64 - 1


@dataclass(frozen=True)
class StoredValue:
    """A decoded entry. ``value`` is None for an absent key and for a tombstone."""

    raw: bytes | None
    value: bytes | None
    lease: int | None = None


ABSENT = StoredValue(None, None)


def decode(raw: bytes | None) -> StoredValue:
    """Return what a raw entry means."""
    if raw is None:
        return ABSENT
    cut = len(raw) - _TRAILER.size
    if cut < 0 or raw[cut : cut + 1] != _MARK:
        return StoredValue(raw, raw)  # written by the server's own add
    lease = _TRAILER.unpack_from(raw, cut)[1]
    if lease == _TOMBSTONE:
        return StoredValue(raw, None)
    return StoredValue(raw, raw[:cut], lease or None)


class Writer:
    """Makes raw entries, no two alike. Thread-safe (one C-level counter)."""

    def __init__(self) -> None:
        self._client = os.urandom(8)
        self._number = itertools.count(1)

    def encode(self, value: bytes, lease: int | None = None) -> bytes:
        return value + _TRAILER.pack(_MARK, lease or _NO_LEASE, self._client, next(self._number))

    def tombstone(self) -> bytes:
        return b"0" + _TRAILER.pack(_MARK, _TOMBSTONE, self._client, next(self._number))
