"""Makes our store of any store of torch: its TCPStore (see ``_tcp``), or one that a user brings.

Owns the mapping of our operations to native ones. Entries of ours live under ``v/``, book-keeping under ``p/`` and
what torch's process groups write under ``t/``, so that none can be mistaken for another. The rest is in
``_torch_link`` (one client), ``_stored_value`` (entries) and ``_torch_lease`` (leases).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch.distributed import PrefixStore
from torch.distributed import Store as C10dStore

from phalanx.comm.stores._counter import counter_value, make_way
from phalanx.comm.stores._for_torch import StoreForTorch, for_torch
from phalanx.comm.stores._interface import Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.comm.stores._polling import PollingWatch, wait_for_keys
from phalanx.comm.stores._stored_value import StoredValue, Writer, decode
from phalanx.comm.stores._torch_lease import VALUES, TorchLease
from phalanx.comm.stores._torch_link import Link
from phalanx.errors import StoreTimeout

_FOR_TORCH = "t/"


def wrap_c10d_store(native: C10dStore) -> Store:
    """Return a store of torch that a user brings, as one of ours. It keeps no leases.

    >>> wrap_c10d_store(torch.distributed.HashStore()).add("joined")       # doctest: +SKIP
    1
    """
    root = native
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    if isinstance(root, StoreForTorch):
        return root.under(native)  # ours all along; torch cannot clone a store written in Python

    def link() -> Link:
        copy = native.clone()  # type: ignore[attr-defined]  # torch's stub forgot it
        return Link(copy, f"c10d:{type(native).__name__}", link, batched=False)

    return TorchStore(link())


def prefixed(native: C10dStore, prefix: str) -> C10dStore:
    """Return a store of torch with every key under ``prefix``."""
    return PrefixStore(prefix, native)


class TorchStore(Store):
    """All operations over one ``Link``."""

    def __init__(self, link: Link, *, space: str = VALUES) -> None:
        self._link = link
        self._space = space
        self._writer = Writer()
        self.address = link.address

    def _record(self, key: str) -> StoredValue:
        return decode(self._link.read(self._space + key))

    def get(self, key: str) -> bytes | None:
        return self._record(key).value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [decode(raw).value for raw in self._link.read_many([self._space + key for key in keys])]

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        if lease is None:
            self.set_many({key: value})
        elif isinstance(lease, TorchLease) and lease.address == self.address:
            lease.bind(key, value)
        else:
            raise TypeError(f"the lease of {key!r} was not made by the store {self.address}")

    def set_many(self, values: Mapping[str, bytes]) -> None:
        raws = {self._space + key: self._writer.encode(value) for key, value in values.items()}
        self._link.write(raws, self._writer.encode(b""))

    def add(self, key: str, amount: int = 1) -> int:
        # Not the server's own add: it takes leading digits for a number and drops a client whose value has none, also
        # where another client has put it there in this very moment.
        for num_tries in itertools.count(1):
            now = self._record(key)
            total = counter_value(key, now.value, self.address) + amount
            if self._link.swap(self._space + key, now.raw, self._writer.encode(b"%d" % total)):
                break
            make_way(num_tries)
        self._link.tick(self._writer.encode(b""))
        return total

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        raw = self._writer.encode(value)
        # Most are from absent, and succeed: the first try needs no look.
        is_set = expected is None and self._link.swap(self._space + key, None, raw)
        while not is_set:
            now = self._record(key)
            if now.value != expected:
                return False
            is_set = self._link.swap(self._space + key, now.raw, raw)
        self._link.tick(self._writer.encode(b""))
        return True

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        # Not the server's own wait: it blocks the connection, counts tombstones, and logs every timeout.
        try:
            return wait_for_keys(self._get_if_all, keys, timeout, self.address)
        except StoreTimeout:
            return wait_for_keys(self.get_many, keys, 0.0, self.address)  # which names those that are missing

    def _get_if_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values in one or two round trips if all are there; else some None, not only for those missing."""
        raws = self._link.read_if_all([self._space + key for key in keys])
        return [None] * len(keys) if raws is None else [decode(raw).value for raw in raws]

    def delete(self, key: str) -> bool:
        if self._record(key).value is None:
            return False
        gone = self._link.delete(self._space + key)
        self._link.tick(self._writer.encode(b""))
        return gone

    def items(self, prefix: str = "") -> dict[str, bytes]:
        records = {key: decode(raw).value for key, raw in _raw_items(self._link, self._space, prefix).items()}
        return {key: value for key, value in records.items() if value is not None}

    def watch(self, prefix: str = "") -> Watch:
        return _TorchWatch(self._link.fork(), self._space, prefix)

    def lease(self, ttl: float) -> Lease:
        if ttl <= 0:
            raise ValueError(f"a lease needs a positive time-to-live, got {ttl}")
        # On the same connection: waits here look again and again, so no call ever keeps it for long.
        return TorchLease(self._link, ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> Store:
        return TorchStore(self._link.fork(), space=self._space)

    def as_c10d(self, prefix: str = "") -> C10dStore:
        # Not a native client: each of them looks the peer's name up when it connects (seconds where the resolver is
        # slow), and its waits block in C++ where nothing can interrupt them.
        return for_torch(TorchStore(self._link, space=_FOR_TORCH), prefix)

    def close(self) -> None:
        self._link.lose(f"store {self.address} was closed by this client")


def _raw_items(link: Link, space: str, prefix: str) -> dict[str, bytes]:
    """Raw entries under ``prefix``, in the order of the keys."""
    start = space + prefix
    keys = sorted(key for key in link.list_keys() if key.startswith(start))
    raws = link.read_many(keys)
    return {key[len(space) :]: raw for key, raw in zip(keys, raws, strict=True) if raw is not None}


class _TorchWatch(PollingWatch):
    def __init__(self, link: Link, space: str, prefix: str) -> None:
        self._link: Link | None = link
        self._space, self._prefix = space, prefix
        self.start()

    def _open(self) -> Link:
        if self._link is None:
            raise ValueError("this watch is closed")
        return self._link

    def _token(self) -> bytes | None:
        return self._open().read_tick()

    def _snapshot(self) -> dict[str, bytes]:
        raws = _raw_items(self._open(), self._space, self._prefix)
        return {key: raw for key, raw in raws.items() if decode(raw).value is not None}

    def _value(self, stamp: bytes) -> bytes:
        value = decode(stamp).value
        assert value is not None, "tombstones are not part of a snapshot"
        return value

    def close(self) -> None:
        self._link = None
