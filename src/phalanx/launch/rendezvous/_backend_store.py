"""Makes a store of any ``RendezvousBackend``: one record that can be read, and replaced by who has read it last.

Owns the record's format: all keys and leases of a job as JSON. Every write is a compare-and-set of the whole, tried
again when another node was faster: right for the few keys of a few nodes, and for nothing else (our own backends have
a key for each record). A lease is a counter that its owner raises; a client that has seen it stand still for its whole
time-to-live removes it, so that no two machines' clocks are ever compared.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from phalanx._fields import load_json
from phalanx.comm.stores._counter import counter_value
from phalanx.comm.stores._interface import Change, Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.comm.stores._polling import wait_for_keys
from phalanx.errors import StoreError, StoreLost
from phalanx.launch.rendezvous._torch_settings import RendezvousBackend

R = TypeVar("R")

INTERVAL = 0.1
"""Seconds between two looks at the record."""

Values = dict[str, list[str]]
"""Key: its value (base64), the lease that it is bound to, if any, and a stamp that no two writes share."""


class _BackendRecord:
    """The record as one client has read it."""

    def __init__(self, data: bytes | None) -> None:
        found: Any = {} if data is None else load_json(data, "the state of the rendezvous", StoreError)
        self.values: Values = found.get("values", {})
        self.leases: dict[str, list[float]] = found.get("leases", {})
        """Lease: its beats so far, and its time-to-live."""

    def to_bytes(self) -> bytes:
        # The last word differs for each writer: a backend may tell success by comparing what it has with what was sent.
        return json.dumps({"values": self.values, "leases": self.leases, "writer": uuid.uuid4().hex}).encode()

    def get(self, key: str) -> bytes | None:
        return base64.b64decode(self.values[key][0]) if key in self.values else None

    def put(self, key: str, value: bytes, lease: str = "") -> None:
        self.values[key] = [base64.b64encode(value).decode(), lease, uuid.uuid4().hex]

    def drop_lease(self, lease: str) -> None:
        self.leases.pop(lease, None)
        self.values = {key: entry for key, entry in self.values.items() if entry[1] != lease}


class BackendStore(Store):
    """All operations on one record. Any thread may call; each waits for the others' writes, not for their waits."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self.address = f"backend:{backend.name}"
        self._backend = backend
        self._lock = threading.RLock()
        self._seen: dict[str, tuple[float, float]] = {}
        """Leases: their last known beat, and since when this client knows it."""
        self._is_closed = False

    # -- the record ------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[_BackendRecord, Any]:
        with self._lock:
            if self._is_closed:
                raise StoreLost(f"store {self.address} was closed by this client", address=self.address)
            found = self._call(self._backend.get_state)
            return _BackendRecord(found[0] if found else None), found[1] if found else None

    def _call(self, method: Callable[..., R], *args: Any) -> R:
        try:
            return method(*args)
        except Exception as error:  # whatever the backend raises
            raise StoreLost(f"the rendezvous backend does not answer: {error!r}", address=self.address) from error

    def _write(self, change: Callable[[_BackendRecord], R]) -> R:
        with self._lock:
            while True:
                record, token = self._read()
                self._drop_expired(record)
                result = change(record)
                done = self._call(self._backend.set_state, record.to_bytes(), token)
                if done is not None and done[2]:
                    return result

    def _drop_expired(self, record: _BackendRecord) -> bool:
        now = time.monotonic()
        self._seen = {
            lease: seen if (seen := self._seen.get(lease, (-1.0, now)))[0] == beat else (beat, now)
            for lease, (beat, _) in record.leases.items()
        }
        over = [lease for lease, (_, ttl) in record.leases.items() if now - self._seen[lease][1] > ttl]
        for lease in over:
            record.drop_lease(lease)
        return bool(over)

    def _look(self) -> _BackendRecord:
        """Read the record, and remove what has run out."""
        with self._lock:
            record, _ = self._read()
            if self._drop_expired(record):
                self._write(lambda record: None)
            return record

    # -- the interface ---------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        return self._look().get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        record = self._look()
        return [record.get(key) for key in keys]

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        if lease is None:
            self._write(lambda record: record.put(key, value))
            return
        if not isinstance(lease, _BackendLease):
            raise TypeError(f"the lease of {key!r} was not made by the store {self.address}")
        name = lease.name

        def bind(record: _BackendRecord) -> bool:
            if name in record.leases:
                record.put(key, value, name)
            return name in record.leases

        if not self._write(bind):
            raise StoreError(f"{self.address}: the lease for {key!r} has run out")

    def add(self, key: str, amount: int = 1) -> int:
        def change(record: _BackendRecord) -> int:
            total = counter_value(key, record.get(key), self.address) + amount
            record.put(key, b"%d" % total)
            return total

        return self._write(change)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        if self.get(key) != expected:
            return False

        def change(record: _BackendRecord) -> bool:
            is_it = record.get(key) == expected
            if is_it:
                record.put(key, value)
            return is_it

        return self._write(change)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        return wait_for_keys(self.get_many, keys, timeout, self.address)

    def delete(self, key: str) -> bool:
        return self._write(lambda record: record.values.pop(key, None) is not None)

    def items(self, prefix: str = "") -> dict[str, bytes]:
        return {key: base64.b64decode(entry[0]) for key, entry in self.entries(prefix).items()}

    def entries(self, prefix: str) -> Values:
        """Return all keys that start with ``prefix``, with what the record has of them."""
        values = self._look().values
        return {key: values[key] for key in sorted(values) if key.startswith(prefix)}

    def watch(self, prefix: str = "") -> Watch:
        return _BackendWatch(self, prefix)

    def lease(self, ttl: float) -> Lease:
        return _BackendLease(self, ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> Store:
        other = BackendStore(self._backend)
        other._lock = self._lock  # a backend need not be ready for two threads at once
        return other

    def as_c10d(self, prefix: str = "") -> Any:
        from phalanx.comm.stores._for_torch import for_torch  # start-up: it imports torch

        return for_torch(self, prefix)

    def close(self) -> None:
        self._is_closed = True


class _BackendLease(Lease):
    def __init__(self, store: BackendStore, ttl: float) -> None:
        if ttl <= 0:
            raise ValueError(f"a lease needs a positive time-to-live, got {ttl}")
        self.ttl = ttl
        self.name = uuid.uuid4().hex
        self._store = store
        store._write(lambda record: record.leases.update({self.name: [0, ttl]}))

    def refresh(self) -> bool:
        def beat(record: _BackendRecord) -> bool:
            if self.name in record.leases:
                record.leases[self.name][0] += 1
            return self.name in record.leases

        return self._store._write(beat)

    def revoke(self) -> None:
        self._store._write(lambda record: record.drop_lease(self.name))


class _BackendWatch(Watch):
    def __init__(self, store: BackendStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._seen = store.entries(prefix)

    def wait(self, timeout: float) -> list[Change]:
        until = time.monotonic() + timeout
        while True:
            before, self._seen = self._seen, self._store.entries(self._prefix)
            keys = sorted(key for key in before.keys() | self._seen.keys() if before.get(key) != self._seen.get(key))
            changes = [Change(key, base64.b64decode(self._seen[key][0]) if key in self._seen else None) for key in keys]
            left = until - time.monotonic()
            if changes or left <= 0:
                return changes
            time.sleep(min(left, INTERVAL))

    def close(self) -> None:
        return None
