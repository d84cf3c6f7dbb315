"""A store on torch's TCPStore: one server process, clients anywhere.

Owns the mapping of our operations to native ones. Entries of ours live under ``v/``, book-keeping under
``p/`` and what torch's process groups write under ``c10d/``, so that none can be mistaken for another. The
rest is in ``_tcp_link`` (connection), ``_tcp_record`` (entries) and ``_tcp_lease`` (leases).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from phalanx.comm.stores._counter import counter_value
from phalanx.comm.stores._interface import Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.comm.stores._polling import PollingWatch, wait_for_keys
from phalanx.comm.stores._tcp_lease import VALUES, Reaper, TCPLease
from phalanx.comm.stores._tcp_link import Link, bound_replies
from phalanx.comm.stores._tcp_record import Record, Writer, decode


class TCPStore(Store):
    """A client of the server at ``host:port``; ``TCPStore.serve()`` starts a server.

    >>> server = TCPStore.serve()                      # doctest: +SKIP
    >>> connect(server.address).add("joined")          # doctest: +SKIP
    1
    """

    def __init__(self, host: str, port: int, *, timeout: float = 30.0) -> None:
        """Connect within ``timeout`` seconds, else ``StoreLost``."""
        self._link = Link(host, port, timeout=timeout)
        self._writer = Writer()
        self._server: dist.TCPStore | None = None
        self._reaper: Reaper | None = None
        self.address = self._link.address

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0) -> TCPStore:
        """Host a server in this process and return a client of it; ``close()`` ends the server too.

        Bound to ``host`` alone (torch by itself would listen on every interface). Starts threads: fork
        before it.
        """
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
        port = listener.getsockname()[1]
        native = dist.TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        bound_replies(port)
        store = cls(host, port)
        store._server = native
        store._reaper = Reaper(store._link.fork())
        return store

    def _record(self, key: str) -> Record:
        return decode(self._link.read(VALUES + key))

    def get(self, key: str) -> bytes | None:
        return self._record(key).value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [decode(raw).value for raw in self._link.read_many([VALUES + key for key in keys])]

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        if lease is None:
            self._link.write(VALUES + key, self._writer.encode(value), self._writer.encode(b""))
        elif isinstance(lease, TCPLease) and lease.address == self.address:
            lease.bind(key, value)
        else:
            raise TypeError(f"the lease of {key!r} was not made by the store {self.address}")

    def add(self, key: str, amount: int = 1) -> int:
        # The server takes leading digits for a number and drops a client whose value has none: look first.
        counter_value(key, self.get(key), self.address)
        total = self._link.call(lambda: self._link.native.add(VALUES + key, amount))
        self._link.tick(self._writer.encode(b""))
        return total

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        raw = self._writer.encode(value)
        while True:
            now = self._record(key)
            if now.value != expected:
                return False
            if self._link.swap(VALUES + key, now.raw, raw):
                self._link.tick(self._writer.encode(b""))
                return True

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        # Not the server's own wait: it blocks the connection, counts tombstones, and logs every timeout.
        return wait_for_keys(self.get_many, keys, timeout, self.address)

    def delete(self, key: str) -> bool:
        if self._record(key).value is None:
            return False
        gone = self._link.call(lambda: self._link.native.delete_key(VALUES + key))
        self._link.tick(self._writer.encode(b""))
        return gone

    def items(self, prefix: str = "") -> dict[str, bytes]:
        records = {key: decode(raw).value for key, raw in _raw_items(self._link, prefix).items()}
        return {key: value for key, value in records.items() if value is not None}

    def watch(self, prefix: str = "") -> Watch:
        return _TCPWatch(self._link.fork(), prefix)

    def lease(self, ttl: float) -> Lease:
        if ttl <= 0:
            raise ValueError(f"a lease needs a positive time-to-live, got {ttl}")
        return TCPLease(self._link.fork(), ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> TCPStore:
        return TCPStore(self._link.host, self._link.port)

    def as_c10d(self, prefix: str = "") -> dist.Store:
        native = self._link.fork().native
        native.set_timeout(timedelta(seconds=300))
        return dist.PrefixStore(f"c10d/{prefix}", native)

    def close(self) -> None:
        self._link.lose(f"store {self.address} was closed by this client")
        if self._reaper is not None:
            self._reaper.close()
        self._server = self._reaper = None


def _raw_items(link: Link, prefix: str) -> dict[str, bytes]:
    """Raw entries under ``prefix``, in the order of the keys."""
    start = VALUES + prefix
    keys = sorted(key for key in link.call(link.native.list_keys) if key.startswith(start))
    raws = link.read_many(keys)
    return {key[len(VALUES) :]: raw for key, raw in zip(keys, raws, strict=True) if raw is not None}


class _TCPWatch(PollingWatch):
    def __init__(self, link: Link, prefix: str) -> None:
        self._link: Link | None = link
        self._prefix = prefix
        self.start()

    def _open(self) -> Link:
        if self._link is None:
            raise ValueError("this watch is closed")
        return self._link

    def _token(self) -> bytes | None:
        return self._open().read_tick()

    def _snapshot(self) -> dict[str, bytes]:
        raws = _raw_items(self._open(), self._prefix)
        return {key: raw for key, raw in raws.items() if decode(raw).value is not None}

    def _value(self, stamp: bytes) -> bytes:
        value = decode(stamp).value
        assert value is not None, "tombstones are not part of a snapshot"
        return value

    def close(self) -> None:
        self._link = None
