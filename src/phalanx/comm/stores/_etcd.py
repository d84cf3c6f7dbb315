"""Keeps a store in an etcd v3 cluster.

Owns the mapping of our operations to etcd transactions. A request whose answer was lost is sent again, perhaps to
another member, and perhaps it was carried out both times; ``set`` and ``delete`` do not mind. ``add`` and
``compare_and_set`` do, so each client has a *marker* key: the transaction also demands that the marker is unchanged
since this client's last write and replaces it by this write's token. So at most one copy takes effect, and a refused
copy shows by the token whether an earlier one did.
Granularity of leases: etcd counts whole seconds and looks twice per second.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.comm.stores import _etcd_gateway
from phalanx.comm.stores._complaints import Complaints
from phalanx.comm.stores._counter import counter_value, make_way
from phalanx.comm.stores._etcd_access import Access
from phalanx.comm.stores._etcd_gateway import NOT_FOUND, EtcdError, Gateway, as_text, b64, range_end, unb64
from phalanx.comm.stores._etcd_watch import EtcdWatch
from phalanx.comm.stores._interface import Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.comm.stores._polling import LONGEST_SLICE, wait_for_keys
from phalanx.errors import StoreError, StoreTimeout

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore  # torch.distributed's, with its stub

log = logging.getLogger(__name__)

_CLOSE_LOOK = 0.25
"""Seconds between two looks of a ``wait`` at whether its store was closed: the stream of changes is another's."""

_BATCH = 100  # etcd takes 128 operations in a transaction by default


class EtcdStore(Store):
    """A client of the cluster whose members listen at ``endpoints``; all keys lie under ``root``.

    >>> EtcdStore(["node1:2379", "node2:2379", "node3:2379"]).add("joined")        # doctest: +SKIP
    1

    ``access``: encryption, certificates and user; without it plain HTTP, which belongs into a private network.
    """

    pushes = True

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        access: Access | None = None,
        timeout: float = 30.0,
        root: str = "phalanx",
        gateway: Gateway | None = None,
    ) -> None:
        """``StoreLost`` when no member answers within ``timeout`` seconds. ``gateway``: a client to use, for clones."""
        self._gateway = gateway or Gateway(endpoints, access)
        self._root = root
        self._values = f"{root}/v/"
        self._marker = self._new_marker()
        self._marker_revision = 0
        self._writing = threading.Lock()
        self._complaints = Complaints(log)
        self._torch: EtcdStore | None = None  # for all process groups; outlives ``close``, as they may
        self.address = self._gateway.address
        try:
            self._gateway.call("/v3/kv/range", {"key": b64(self._marker)}, patience=timeout)
        except BaseException:
            self._gateway.close()
            raise

    def get(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), _BATCH):
            reads = [{"request_range": {"key": self._key(key)}} for key in keys[start : start + _BATCH]]
            answer = self._gateway.call("/v3/kv/txn", {"success": reads})
            entries = [_entry(response) for response in answer["responses"]]
            found += [None if entry is None else entry.value for entry in entries]
        return found

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        body = {"key": self._key(key), "value": b64(value)}
        if lease is not None:
            if not isinstance(lease, EtcdLease) or lease.address != self.address:
                raise TypeError(f"the lease of {key!r} was not made by the store {self.address}")
            body["lease"] = lease.id
        try:
            self._gateway.call("/v3/kv/put", body)
        except EtcdError as error:
            if lease is None or error.code != NOT_FOUND:
                raise
            raise StoreError(f"cannot set {key!r} in {self.address}: its lease has run out") from error

    def set_many(self, values: Mapping[str, bytes]) -> None:
        writes = [{"request_put": {"key": self._key(key), "value": b64(value)}} for key, value in values.items()]
        for start in range(0, len(writes), _BATCH):
            self._gateway.call("/v3/kv/txn", {"success": writes[start : start + _BATCH]})

    def add(self, key: str, amount: int = 1) -> int:
        answer = self._gateway.call("/v3/kv/range", {"key": self._key(key)})
        entry = _Revision.of(answer)
        for num_tries in itertools.count(1):
            total = counter_value(key, None if entry is None else entry.value, self.address) + amount
            condition = {"target": "MOD", "mod_revision": str(0 if entry is None else entry.revision)}
            done, entry = self._write_if(key, condition, b"%d" % total)
            if done:
                break
            make_way(num_tries)
            entry = _Revision.of(self._gateway.call("/v3/kv/range", {"key": self._key(key)}))
        return total

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        if expected is None:
            condition = {"target": "CREATE", "create_revision": "0"}
        else:
            condition = {"target": "VALUE", "value": b64(expected)}
        while True:
            done, entry = self._write_if(key, condition, value)
            if done or (None if entry is None else entry.value) != expected:
                return done

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        if timeout <= LONGEST_SLICE:  # a stream of changes is a connection of its own: not for so short a time
            return wait_for_keys(self.get_many, keys, timeout, self.address)
        deadline = time.monotonic() + timeout
        values = self.get_many(keys)
        if None in values and timeout > 0:
            with self.watch(os.path.commonprefix(list(keys))) as watch:  # noqa: RUF071  # text is meant
                values = self.get_many(keys)
                while None in values and (left := deadline - time.monotonic()) > 0:
                    if watch.wait(min(left, _CLOSE_LOOK)):
                        values = self.get_many(keys)
                    self._gateway.client()  # StoreLost when another thread has closed this store meanwhile
        found = [value for value in values if value is not None]
        if len(found) == len(keys):
            return found
        missing = [key for key, value in zip(keys, values, strict=True) if value is None]
        raise StoreTimeout(f"{self.address}: no {missing} after {timeout:g} s")

    def delete(self, key: str) -> bool:
        answer = self._gateway.call("/v3/kv/deleterange", {"key": self._key(key)})
        return int(answer.get("deleted", 0)) > 0

    def items(self, prefix: str = "") -> dict[str, bytes]:
        start = (self._values + prefix).encode()
        body = {"key": b64(start), "range_end": b64(range_end(start))}
        entries = self._gateway.call("/v3/kv/range", body).get("kvs", [])
        cut = len(self._values)
        found = {as_text(kv["key"]): unb64(kv.get("value", "")) for kv in entries}
        return {key[cut:]: value for key, value in found.items() if key is not None}

    def watch(self, prefix: str = "") -> Watch:
        answer = self._gateway.call("/v3/kv/range", {"key": b64(self._marker)})
        gateway = self._gateway.another()
        start = (self._values + prefix).encode()
        return EtcdWatch(gateway, start, len(self._values), int(answer["header"]["revision"]))

    def lease(self, ttl: float) -> Lease:
        if ttl <= 0:
            raise ValueError(f"a lease needs a positive time-to-live, got {ttl}")
        answer = self._gateway.call("/v3/lease/grant", {"TTL": str(math.ceil(ttl))})
        return EtcdLease(self._gateway, str(answer["ID"]), ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def hurry(self) -> None:
        """Have this client and its clones wait no more for a cluster that does not answer: it is about to end."""
        self._gateway.hurry()

    def gateway(self) -> Gateway:
        """Return one more client of the same cluster, for what is no business of a store: its members."""
        return self._gateway.another()

    def clone(self) -> EtcdStore:
        return self._another(self._root)

    def _another(self, root: str) -> EtcdStore:
        """Return one more client of a cluster that has answered before."""
        gateway = self._gateway.another()
        return EtcdStore(gateway.endpoints, timeout=_etcd_gateway.PATIENCE, root=root, gateway=gateway)

    def as_c10d(self, prefix: str = "") -> C10dStore:
        from phalanx.comm.stores._for_torch import for_torch  # start-up: it imports torch

        with self._writing:
            if self._torch is None:
                self._torch = self._another(f"{self._root}/c10d")
        return for_torch(self._torch, prefix)

    def close(self) -> None:
        if self._marker_revision:
            self._marker_revision = 0
            try:
                self._gateway.call("/v3/kv/deleterange", {"key": b64(self._marker)}, patience=0)
            except StoreError:
                pass  # a marker left behind harms nobody
        self._gateway.close()

    def _new_marker(self) -> bytes:
        return f"{self._root}/clients/{os.urandom(8).hex()}".encode()

    def _key(self, key: str) -> str:
        return b64((self._values + key).encode())

    def _write_if(self, key: str, condition: dict[str, str], value: bytes) -> tuple[bool, _Revision | None]:
        """Write if ``condition`` holds, once; otherwise the entry as it is."""
        name, marker = self._key(key), b64(self._marker)
        with self._writing:
            token = os.urandom(8)
            unchanged = {"key": marker, "target": "MOD", "mod_revision": str(self._marker_revision)}
            body = {
                "compare": [{"key": name, **condition}, unchanged],
                "success": [
                    {"request_put": {"key": name, "value": b64(value)}},
                    {"request_put": {"key": marker, "value": b64(token)}},
                ],
                "failure": [{"request_range": {"key": name}}, {"request_range": {"key": marker}}],
            }
            answer = self._gateway.call("/v3/kv/txn", body)
            if answer.get("succeeded"):
                self._marker_revision = int(answer["header"]["revision"])
                return True, None
            entry, mark = (_entry(response) for response in answer["responses"])
            if mark is not None and mark.value == token:
                self._marker_revision = mark.revision
                return True, None  # an earlier copy of this request, whose answer was lost, did it
            if (0 if mark is None else mark.revision) != self._marker_revision:
                # A stranger wrote to the marker or deleted it, so that this write cannot have been carried out, and
                # no later one would: take another marker. To the caller it is as if another writer had been quicker.
                self._complaints.say("marker", f"{self.address}: a stranger changed the marker of this client")
                self._marker, self._marker_revision = self._new_marker(), 0
            return False, entry


class _Revision:
    """A key's value and the revision that wrote it."""

    def __init__(self, kv: dict[str, Any]) -> None:
        self.value = unb64(kv.get("value", ""))
        self.revision = int(kv["mod_revision"])

    @classmethod
    def of(cls, answer: dict[str, Any]) -> _Revision | None:
        entries = answer.get("kvs", [])
        return cls(entries[0]) if entries else None


def _entry(response: dict[str, Any]) -> _Revision | None:
    return _Revision.of(response["response_range"])


class EtcdLease(Lease):
    """A lease of an ``EtcdStore``; made by ``lease()``."""

    def __init__(self, gateway: Gateway, number: str, ttl: float) -> None:
        self._gateway = gateway
        self.id = number
        self.ttl = ttl
        self.address = gateway.address

    def refresh(self) -> bool:
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": self.id})
        return int(answer["result"].get("TTL", 0)) > 0

    def revoke(self) -> None:
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": self.id})
        except EtcdError as error:
            if error.code != NOT_FOUND:  # it has run out already
                raise
