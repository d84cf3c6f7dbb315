"""Shows any store of ours as a store of torch, for its process groups.

Owns the translation between the two sets of semantics: torch's ``get`` and ``multi_get`` wait for the key,
its ``compare_set`` answers with the value and takes empty text for "absent". Torch's queues are not offered
(no process group uses them).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta

# The same class as torch.distributed.Store, from where its stub can be seen.
from torch.distributed import Store as TorchStore

from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._polling import slice_after
from phalanx.errors import StoreTimeout

_PROBE = "phalanx-which-prefix"


class StoreForTorch(TorchStore):
    """``store`` with every key under ``prefix``. Made by ``Store.as_c10d``."""

    def __init__(self, store: Store, prefix: str = "") -> None:
        super().__init__()
        self.store = store
        self.prefix = prefix
        self._asked = ""

    def _seconds(self) -> float:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stub forgot it
        return timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        self.store.set(self.prefix + key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.store.wait([self.prefix + key for key in keys], self._seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self.store.add(self.prefix + key, value)

    def append(self, key: str, value: str | bytes) -> None:
        while True:
            before = self.store.get(self.prefix + key)
            after = (before or b"") + _as_bytes(value)
            if self.store.compare_and_set(self.prefix + key, before, after):
                return

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted, value = _as_bytes(expected), _as_bytes(desired)
        while True:
            now = self.store.get(self.prefix + key)
            if now is None and wanted:
                return wanted  # torch's answer for an absent key that was expected to hold something
            if now is not None and now != wanted:
                return now
            if self.store.compare_and_set(self.prefix + key, now, value):
                return value

    def under(self, outer: TorchStore) -> Store:
        """Our store at the place where ``outer``, some PrefixStores around this one, puts its keys.

        Torch does not tell a PrefixStore's prefix, but the key that arrives here does.
        """
        self._asked = ""
        outer.check([_PROBE])
        place = (self.prefix + self._asked).strip("/")
        return self.store.namespace(place) if place else self.store

    def check(self, keys: Sequence[str]) -> bool:
        if keys and keys[0].endswith(_PROBE):
            self._asked = keys[0].removesuffix(_PROBE)
            return False
        return None not in self.store.get_many([self.prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds() if timeout is None else timeout.total_seconds()
        self.store.wait([self.prefix + key for key in keys], seconds)

    def delete_key(self, key: str) -> bool:
        return self.store.delete(self.prefix + key)

    def num_keys(self) -> int:
        return len(self.store.items(self.prefix))

    def list_keys(self) -> list[str]:
        return [key[len(self.prefix) :] for key in self.store.items(self.prefix)]

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> StoreForTorch:
        # Its calls do not block each other: no new connection.
        other = StoreForTorch(self.store, self.prefix)
        other.set_timeout(timedelta(seconds=self._seconds()))
        _kept.append(other)
        return other

    # Torch's C++ side looks some of them up by these names.
    deleteKey = delete_key
    getNumKeys = num_keys
    listKeys = list_keys


class ExchangeForTorch(StoreForTorch):
    """For an engine whose ranks each write one key that ends in ``/rank`` and read those of all others, as gloo's do to
    connect. Rank 0 collects what they have written and writes it as one record, which the others read.

    So each rank asks twice, however many there are; gloo by itself asks twice for each other rank. A rank has
    ``timeout`` seconds to come, whatever the engine would wait: connecting begins when all have written.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, prefix)
        self._rank = rank
        self._size = size
        self._patience = timeout
        self._collected: dict[str, list[bytes]] = {}
        self._folder = ""
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """End what still waits for other ranks, with ``StoreTimeout``."""
        self._is_given_up.set()

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not written; none where all have, or none was asked for."""
        if not self._folder:
            return ()
        found = self.store.get_many([f"{self._folder}{rank}" for rank in range(self._size)])
        return tuple(rank for rank, value in enumerate(found) if value is None)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._find(key, self._seconds()) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds() if timeout is None else timeout.total_seconds()
        for key in keys:
            self._find(key, seconds)

    def _find(self, key: str, seconds: float) -> bytes:
        folder, _, name = key.rpartition("/")
        if not (name.isdigit() and int(name) < self._size):
            return self.store.wait([self.prefix + key], seconds)[0]
        if folder not in self._collected:
            self._folder = f"{self.prefix}{folder}/"
            self._collected[folder] = self._collect(self._folder)
        return self._collected[folder][int(name)]

    def _collect(self, folder: str) -> list[bytes]:
        if self._rank:
            return _unpack(self._await([f"{folder}all"])[0])
        values = self._await([f"{folder}{rank}" for rank in range(self._size)])
        self.store.set(f"{folder}all", _pack(values))
        return values

    def _await(self, keys: Sequence[str]) -> list[bytes]:
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            try:
                return self.store.wait(keys, min(slice_after(waited), max(0.0, self._patience - waited)))
            except StoreTimeout:
                if waited > self._patience or self._is_given_up.is_set():
                    raise

    def clone(self) -> StoreForTorch:
        other = ExchangeForTorch(self.store, self.prefix, self._rank, self._size, self._patience)
        other._is_given_up = self._is_given_up
        other.set_timeout(timedelta(seconds=self._seconds()))
        _kept.append(other)
        return other


def exchange_for_torch(native: TorchStore, rank: int, size: int, timeout: float) -> ExchangeForTorch:
    """Return ``native``, made by ``as_c10d``, for a gloo of so many ranks, for as long as the process lives."""
    assert isinstance(native, StoreForTorch), "every store of ours makes one"
    made = ExchangeForTorch(native.store, native.prefix, rank, size, timeout)
    _kept.append(made)
    return made


def _pack(values: Sequence[bytes]) -> bytes:
    """Return the values as one, small, since all ranks read it from one host: compressed, by their differences from the
    first, which are mostly zeros (an address of gloo repeats a number for every other rank, the same in all of them).

    >>> _unpack(_pack([b"one", b"", b"three"]))
    [b'one', b'', b'three']
    """
    parts = [value if index == 0 else _differences(value, values[0]) for index, value in enumerate(values)]
    return zlib.compress(b"".join(len(part).to_bytes(4, "little") + part for part in parts))


def _unpack(packed: bytes) -> list[bytes]:
    data = zlib.decompress(packed)
    found: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        found.append(_differences(data[at + 4 : end], found[0]) if found else data[at + 4 : end])
        at = end
    return found


def _differences(value: bytes, first: bytes) -> bytes:
    """Return ``value`` with 0 where it is as ``first``; of that, ``value`` again."""
    length = min(len(value), len(first))
    bits = int.from_bytes(value[:length], "little") ^ int.from_bytes(first[:length], "little")
    return bits.to_bytes(length, "little") + value[length:]


# Torch's C++ side keeps its half of a store alive, but not the Python half that answers: a process group that still
# holds the store would call into nothing. Nobody can tell when it is done, so they stay. Each is a few hundred bytes.
_kept: list[StoreForTorch] = []


def for_torch(store: Store, prefix: str) -> TorchStore:
    """``store`` under ``prefix`` for torch, for as long as the process lives."""
    _kept.append(StoreForTorch(store, prefix))
    return _kept[-1]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
