"""Counts what one client of a store asks of it: calls by name, keys named in them, bytes of keys and values.

A store for measurements: everything goes to the store below. A call is one request to a store that answers each in one
round trip; a ``wait`` is one as well. With ``patient`` a ``wait`` is never given up early, so that counts do not
depend on how busy the machine is: who waits in slices, to look elsewhere in between, waits in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.comm.stores import Store
from phalanx.comm.stores._for_torch import StoreForTorch, for_torch
from phalanx.comm.stores._interface import Lease, Watch
from phalanx.comm.stores._namespace import NamespacedStore

PATIENCE = 120.0


@dataclass
class Requests:
    """What a client has asked so far."""

    calls: Counter[str] = field(default_factory=Counter)
    num_keys: int = 0
    num_bytes: int = 0
    named: list[str] = field(default_factory=list)
    """Each call, with its first key: to read, where a count is not as expected."""

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def note(self, call: str, keys: Sequence[str], values: Sequence[bytes | None] = ()) -> None:
        self.calls[call] += 1
        self.num_keys += len(keys)
        self.num_bytes += sum(map(len, keys)) + sum(len(value) for value in values if value is not None)
        self.named.append(f"{call} {keys[0] if keys else ''}" + (f" +{len(keys) - 1}" if len(keys) > 1 else ""))

    def clear(self) -> None:
        self.calls.clear()
        self.named.clear()
        self.num_keys = self.num_bytes = 0


class CountedStore(Store):
    """``below``, with every call noted in ``requests``, those of its namespaces too. What other threads ask by clones
    of it, while their worker computes, is not."""

    def __init__(self, below: Store, requests: Requests, *, patient: bool = False, clones: bool = False) -> None:
        """``clones``: count what is asked by those, too."""
        self._below = below
        self.requests = requests
        self._patient = patient
        self._clones = clones
        self.address = below.address
        self.pushes = below.pushes

    def _like(self, below: Store) -> CountedStore:
        return CountedStore(below, self.requests, patient=self._patient, clones=self._clones)

    def get(self, key: str) -> bytes | None:
        value = self._below.get(key)
        self.requests.note("get", [key], [value])
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        values = self._below.get_many(keys)
        self.requests.note("get_many", keys, values)
        return values

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        self.requests.note("set", [key], [value])
        self._below.set(key, value, lease=lease)

    def set_many(self, values: Mapping[str, bytes]) -> None:
        self.requests.note("set_many", list(values), list(values.values()))
        self._below.set_many(values)

    def add(self, key: str, amount: int = 1) -> int:
        self.requests.note("add", [key])
        return self._below.add(key, amount)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        self.requests.note("compare_and_set", [key], [expected, value])
        return self._below.compare_and_set(key, expected, value)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        values: Sequence[bytes] = ()
        try:
            values = self._below.wait(keys, max(timeout, PATIENCE) if self._patient else timeout)
            return list(values)
        finally:  # also of one that was in vain
            self.requests.note("wait", keys, values)

    def delete(self, key: str) -> bool:
        self.requests.note("delete", [key])
        return self._below.delete(key)

    def items(self, prefix: str = "") -> dict[str, bytes]:
        found = self._below.items(prefix)
        self.requests.note("items", [prefix, *found], list(found.values()))
        return found

    def watch(self, prefix: str = "") -> Watch:
        self.requests.note("watch", [prefix])
        return self._below.watch(prefix)

    def lease(self, ttl: float) -> Lease:
        self.requests.note("lease", [])
        return self._below.lease(ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> Store:
        below = self._below.clone()
        return self._like(below) if self._clones else below

    def as_c10d(self, prefix: str = "") -> Any:
        native = self._below.as_c10d(prefix)
        assert isinstance(native, StoreForTorch), "every store of ours makes one"
        return for_torch(self._like(native.store), native.prefix)

    def close(self) -> None:
        self._below.close()
