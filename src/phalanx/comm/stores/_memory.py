"""Keeps a store inside one process: the threads of a simulation and tests share it.

Owns the map, its watches and its leases behind one lock. Clients (``clone``) are handles on the same map.
Time is a function that is passed in, so that tests can move it by hand. Expiry happens when somebody looks:
every call first drops what has run out, and blocked calls wake up when the next lease ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.comm.stores._counter import counter_value
from phalanx.comm.stores._interface import Change, Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.errors import StoreError, StoreLost, StoreTimeout

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore  # torch.distributed's, with its stub


class _Map:
    """The shared state. All methods need ``lock`` held."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.sleepers: dict[str, set[threading.Condition]] = {}  # by the key that they wait for
        self.next_end = math.inf  # no lease ends before
        self.values: dict[str, tuple[bytes, MemoryLease | None]] = {}
        self.leases: set[MemoryLease] = set()
        self.watches: list[_MemoryWatch] = []
        self.torch: _Map | None = None  # what process groups write, apart from the rest

    def write(self, key: str, value: bytes | None, lease: MemoryLease | None = None) -> None:
        if value is None:
            del self.values[key]
        else:
            self.values[key] = (value, lease)
        for watch in self.watches:
            if key.startswith(watch.prefix):
                watch.pending.append(Change(key, value))
                watch.condition.notify_all()
        for condition in self.sleepers.get(key, ()):  # only who waits for it: a thousand threads may be asleep
            condition.notify_all()

    def drop_expired(self) -> None:
        now = self.clock()
        if now < self.next_end:
            return
        for lease in [lease for lease in self.leases if lease.deadline <= now]:
            self.drop(lease)
        self.next_end = min((lease.deadline for lease in self.leases), default=math.inf)

    def drop(self, lease: MemoryLease) -> None:
        self.leases.discard(lease)
        for key in [key for key, (_, owner) in self.values.items() if owner is lease]:
            self.write(key, None)

    def start(self, lease: MemoryLease) -> None:
        self.leases.add(lease)
        if lease.deadline < self.next_end:
            self.next_end = lease.deadline
            for watch in self.watches:  # they sleep until the next lease ends
                watch.condition.notify_all()

    def wake_all(self) -> None:
        for conditions in self.sleepers.values():
            for condition in conditions:
                condition.notify_all()
        for watch in self.watches:
            watch.condition.notify_all()


class MemoryStore(Store):
    """A store for the threads of one process; ``clone()`` gives each its own client.

    >>> MemoryStore().add("joined")
    1
    """

    pushes = True

    def __init__(self, name: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = f"memory://{name}"
        self._map = _Map(clock)
        self._closed = False

    def _look(self) -> _Map:
        """Return the map, with its lock held, after dropping what has run out."""
        if self._closed:
            raise StoreLost(f"store {self.address} was closed by this client", address=self.address)
        self._map.drop_expired()
        return self._map

    def get(self, key: str) -> bytes | None:
        with self._map.lock:
            entry = self._look().values.get(key)
            return None if entry is None else entry[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._map.lock:
            values = self._look().values
            return [values[key][0] if key in values else None for key in keys]

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        with self._map.lock:
            state = self._look()
            if lease is None:
                state.write(key, bytes(value))
                return
            if not isinstance(lease, MemoryLease) or lease.state is not state:
                raise TypeError(f"the lease of {key!r} was not made by the store {self.address}")
            if lease not in state.leases:
                raise StoreError(f"cannot set {key!r} in {self.address}: its lease has run out")
            state.write(key, bytes(value), lease)

    def add(self, key: str, amount: int = 1) -> int:
        with self._map.lock:
            state = self._look()
            entry = state.values.get(key)
            total = counter_value(key, None if entry is None else entry[0], self.address) + amount
            state.write(key, b"%d" % total)
            return total

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        with self._map.lock:
            state = self._look()
            entry = state.values.get(key)
            if (None if entry is None else entry[0]) != expected:
                return False
            state.write(key, bytes(value))
            return True

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        deadline = self._map.clock() + timeout
        with self._map.lock:
            while True:
                state = self._look()
                missing = [key for key in keys if key not in state.values]
                if not missing:
                    return [state.values[key][0] for key in keys]
                if state.clock() >= deadline:
                    raise StoreTimeout(f"{self.address}: no {missing} after {timeout:g} s")
                self._sleep(state, missing[0], deadline - state.clock())

    def _sleep(self, state: _Map, key: str, timeout: float) -> None:
        """Until somebody writes ``key`` or the client is closed; needs the lock."""
        condition = threading.Condition(state.lock)
        state.sleepers.setdefault(key, set()).add(condition)
        try:
            condition.wait(timeout)
        finally:
            state.sleepers[key].discard(condition)
            if not state.sleepers[key]:
                del state.sleepers[key]

    def delete(self, key: str) -> bool:
        with self._map.lock:
            state = self._look()
            if key not in state.values:
                return False
            state.write(key, None)
            return True

    def items(self, prefix: str = "") -> dict[str, bytes]:
        with self._map.lock:
            values = self._look().values
            return {key: values[key][0] for key in sorted(values) if key.startswith(prefix)}

    def watch(self, prefix: str = "") -> Watch:
        with self._map.lock:
            watch = _MemoryWatch(self, prefix)
            self._look().watches.append(watch)
            return watch

    def lease(self, ttl: float) -> Lease:
        if ttl <= 0:
            raise ValueError(f"a lease needs a positive time-to-live, got {ttl}")
        with self._map.lock:
            lease = MemoryLease(self._look(), ttl)
            lease.state.start(lease)
            return lease

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> MemoryStore:
        with self._map.lock:
            other = MemoryStore.__new__(MemoryStore)
            other.address, other._map, other._closed = self.address, self._look(), False
            return other

    def as_c10d(self, prefix: str = "") -> C10dStore:
        from phalanx.comm.stores._for_torch import for_torch  # start-up: it imports torch

        other = self.clone()
        with self._map.lock:
            self._map.torch = other._map = self._map.torch or _Map(self._map.clock)
        return for_torch(other, prefix)

    def close(self) -> None:
        with self._map.lock:
            self._closed = True
            self._map.wake_all()


class MemoryLease(Lease):
    """A lease of a ``MemoryStore``; made by ``lease()``."""

    def __init__(self, state: _Map, ttl: float) -> None:
        self.state = state
        self.ttl = ttl
        self.deadline = state.clock() + ttl

    def refresh(self) -> bool:
        with self.state.lock:
            self.state.drop_expired()
            if self not in self.state.leases:
                return False
            self.deadline = self.state.clock() + self.ttl
            return True

    def revoke(self) -> None:
        with self.state.lock:
            self.state.drop(self)


class _MemoryWatch(Watch):
    def __init__(self, store: MemoryStore, prefix: str) -> None:
        self._store = store
        self.prefix = prefix
        self.pending: list[Change] = []
        self.condition = threading.Condition(store._map.lock)

    def wait(self, timeout: float) -> list[Change]:
        with self._store._map.lock:
            state = self._store._look()
            deadline = state.clock() + timeout
            while not self.pending and state.clock() < deadline:
                self.condition.wait(max(0.0, min(deadline, state.next_end) - state.clock()))
                self._store._look()
            changes, self.pending = self.pending, []
            return changes

    def close(self) -> None:
        with self._store._map.lock:
            if self in self._store._map.watches:
                self._store._map.watches.remove(self)
