"""Serves and asks the endpoints of a job's own etcd: small TCP stores that say where the cluster is.

Owns what is written there: one record of the cluster, and a sign of life of each node that waits for it. Decisions are
``_etcd_founding``'s. Whoever has a member tells every endpoint, again and again (``Herald``): an agent whose machine
was lost and returns finds the record in its own new store, and a newcomer at any other endpoint. That goes on while the
cluster elects a leader, because it needs no answer of etcd.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx._reach import reach
from phalanx.comm import stores
from phalanx.comm._background import FOREVER, Background
from phalanx.comm.stores._interface import Lease, Store
from phalanx.comm.stores._signing import Signer
from phalanx.errors import StoreError
from phalanx.launch.rendezvous._etcd_founding import Founding, RecordChoice, decide_founding, decide_telling
from phalanx.launch.rendezvous._interface import RendezvousConnectionError
from phalanx.launch.rendezvous._store_records import open_record
from phalanx.protocol import (
    ETCD_CLUSTER,
    ETCD_ENDPOINT,
    ETCD_WAITING,
    PRESENT,
    ClusterRecord,
    etcd_waiting_key,
)

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds for a cluster that lives to say so at an endpoint that is served anew."""
TELL = 0.5
"""Seconds between two rounds of a member to all endpoints."""
_WAITING_TTL = 5.0
"""Seconds after which a node that waited at an endpoint and was lost is no longer counted."""
_LOOK = 0.1
_KNOCK = 0.5
"""Seconds for a machine with an endpoint to answer."""

Endpoint = tuple[str, int]
Answers = Callable[[ClusterRecord], bool]


class DiscoveryBoard:
    """Reads and writes what the endpoints of a job say, for the node ``node``. Not for several threads at once."""

    def __init__(self, endpoints: Sequence[Endpoint], signer: Signer, node: str) -> None:
        self._endpoints = list(endpoints)
        self._signer = signer
        self._node = node
        self._clients: dict[Endpoint, Store] = {}
        self._served: Store | None = None
        self._has_refused = False  # a record that was not signed with this job's secret: waiting long is no use
        self._place: tuple[Store, Lease, float] | None = None  # where this node has signed, and when it does so again

    def serve(self, store: Store) -> None:
        """Keep the store that this agent serves at its endpoint."""
        self._served = store

    # -- looking for the cluster ---------------------------------------------------------------------------------

    def wait_as_first(self, offer: ClusterRecord, *, min_nodes: int, timeout: float) -> ClusterRecord:
        """Return where the cluster is, for the agent at the first endpoint: ``offer`` when it is to begin that one."""
        assert self._served is not None, "it is open"
        began = time.monotonic()
        while (waited := time.monotonic() - began) < timeout:
            num_fresh = self._count_fresh(self._served)
            known = self._read(self._served) or self._ask_others()
            action = decide_founding(known, num_fresh=num_fresh, waited=waited, min_nodes=min_nodes, grace=GRACE)
            if action is Founding.JOIN and known is not None:
                return known
            if action is Founding.BEGIN and self._claim(self._served, offer):
                return offer
            time.sleep(_LOOK)
        raise RendezvousConnectionError(
            f"node {self._node} has waited {timeout:g} s at {self._shown()} for the {min_nodes} nodes with which the "
            f"job's etcd begins, or for one that knows of it; {self._count_fresh(self._served)} came. Start the "
            "missing ones, or raise join_timeout"
        )

    def wait_anywhere(self, *, reach: float, timeout: float) -> ClusterRecord:
        """Ask all endpoints until one knows: ``reach`` seconds for one that is open, ``timeout`` in all."""
        began = time.monotonic()
        is_open = False
        try:
            while time.monotonic() < began + (timeout if is_open else reach):
                for endpoint in self._endpoints:
                    client = self._client(endpoint)
                    found = None if client is None else self._ask(endpoint, client)
                    if found is not None:
                        return found
                is_open = (self._sign() or is_open) and not self._has_refused
                time.sleep(_LOOK)
        finally:
            self._strike_out()
        if is_open:
            raise RendezvousConnectionError(
                f"node {self._node} has waited {timeout:g} s at {self._shown()} for the job's etcd, which nobody has "
                "begun: fewer nodes have come than the job needs, or they have another secret"
            )
        raise RendezvousConnectionError(
            f"nobody at {self._shown()} has said within {reach:g} s where the job's etcd is. Do the agents of those "
            "machines run with the same --rdzv-conf embedded=N and the same secret, and are the ports open?"
        )

    def forget(self, record: ClusterRecord) -> None:
        """Take a record out of this agent's own store: that cluster does not answer. If it lives, it says so again."""
        if self._served is not None and self._read(self._served) == record:
            self._served.delete(ETCD_CLUSTER)

    def _claim(self, store: Store, offer: ClusterRecord) -> bool:
        """Write the record of a new cluster where none is: one that lives may have told this endpoint just now."""
        raw = store.get(ETCD_CLUSTER)
        return self._open(raw) is None and store.compare_and_set(ETCD_CLUSTER, raw, self._sealed(offer))

    def _ask_others(self) -> ClusterRecord | None:
        for endpoint in self._endpoints[1:]:
            client = self._client(endpoint)
            found = None if client is None else self._ask(endpoint, client)
            if found is not None:
                return found
        return None

    def _sign(self) -> bool:
        """Say at the first endpoint that this node waits and knows of no cluster; False when it is not open."""
        endpoint = self._endpoints[0]
        client = self._client(endpoint)
        if client is None:
            return False
        try:
            if self._place is None or self._place[0] is not client:
                key, lease = etcd_waiting_key(self._node), client.lease(_WAITING_TTL)
                client.set(key, self._signer.seal(key, PRESENT), lease=lease)
                self._place = (client, lease, time.monotonic() + _WAITING_TTL / 4)
            elif time.monotonic() >= self._place[2]:
                kept = self._place[1].refresh()
                self._place = (client, self._place[1], time.monotonic() + _WAITING_TTL / 4) if kept else None
        except StoreError:
            self._drop(endpoint)
            return False
        return True

    def _strike_out(self) -> None:
        if self._place is not None:
            with suppress(StoreError):
                self._place[1].revoke()
            self._place = None

    def _count_fresh(self, store: Store) -> int:
        """Return how many nodes wait for a cluster at the endpoint that this one holds, with this one."""
        return 1 + sum(self._signer.opens(key, value) for key, value in store.items(ETCD_WAITING).items())

    # -- telling of it -------------------------------------------------------------------------------------------

    def tell(self, own: ClusterRecord, *, acts: bool, answers: Answers) -> ClusterRecord | None:
        """Tell every endpoint that answers of this node's cluster; returns an elder one that lives, if one knows it."""
        for endpoint in self._endpoints:
            if not _is_open(endpoint):  # a client would wait long for a machine that is gone
                self._drop(endpoint)
            elif (elder := self._tell_endpoint(endpoint, own, acts, answers)) is not None:
                return elder
        return None

    def _tell_endpoint(
        self, endpoint: Endpoint, own: ClusterRecord, acts: bool, answers: Answers
    ) -> ClusterRecord | None:
        for _ in range(2):  # a client may be one of a server that is gone, while there is another now
            client = self._client(endpoint)
            if client is None:
                break
            try:
                found = self._read(client)
                action = decide_telling(own, found, acts=acts, answers=answers)
                if action is RecordChoice.WRITE:
                    client.set(ETCD_CLUSTER, self._sealed(own))
                return found if action is RecordChoice.GIVE_UP else None
            except StoreError:
                self._drop(endpoint)
        return None

    # -- clients and records -------------------------------------------------------------------------------------

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self._served is not None:
            self._served.close()
            self._served = None

    def _shown(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._endpoints)

    def _client(self, endpoint: Endpoint) -> Store | None:
        """Return a client of the store at an endpoint, if it is open. torch's client would wait for it: knock first."""
        if endpoint not in self._clients:
            if not _is_open(endpoint):
                return None
            try:
                store = stores.TCPStore(*endpoint, timeout=5.0)
                if store.get(ETCD_ENDPOINT) is None:  # somebody else's, as that of an agent without its own etcd
                    store.close()
                    return None
            except StoreError:
                return None
            self._clients[endpoint] = store
        return self._clients[endpoint]

    def _ask(self, endpoint: Endpoint, client: Store) -> ClusterRecord | None:
        try:
            return self._read(client)
        except StoreError:
            self._drop(endpoint)
            return None

    def _drop(self, endpoint: Endpoint) -> None:
        if endpoint in self._clients:
            self._clients.pop(endpoint).close()

    def _sealed(self, record: ClusterRecord) -> bytes:
        return self._signer.seal(ETCD_CLUSTER, record.to_json())

    def _read(self, store: Store) -> ClusterRecord | None:
        return self._open(store.get(ETCD_CLUSTER))

    def _open(self, raw: bytes | None) -> ClusterRecord | None:
        """Return the record; None for what is none or a stranger's."""
        found = open_record(self._signer, ETCD_CLUSTER, raw, ClusterRecord)
        if raw is not None and found is None:
            self._has_refused = True
        return found if found is not None and found.members else None


class Herald:
    """Tells the endpoints of this node's cluster, in a thread, as long as ``record`` returns one (None: this node has
    no member); the second value says whether this node acts. ``give_up`` hears of an elder cluster, once."""

    def __init__(
        self,
        board: DiscoveryBoard,
        record: Callable[[], tuple[ClusterRecord | None, bool]],
        *,
        answers: Answers,
        give_up: Callable[[ClusterRecord], None],
    ) -> None:
        self._board = board
        self._record = record
        self._answers = answers
        self._give_up = give_up
        self._stop = threading.Event()
        self._thread = Background(self._run, "phalanx-etcd-herald", on_failure=self._fail, attempts=FOREVER)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.has_started:
            self._thread.join(60.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            own, acts = self._record()
            elder = None if own is None else self._board.tell(own, acts=acts, answers=self._answers)
            if elder is not None:
                self._give_up(elder)
                return
            self._stop.wait(TELL)

    def _fail(self, error: BaseException) -> None:
        log.error("this node no longer tells where the job's etcd is: %r", error)


def _is_open(endpoint: Endpoint) -> bool:
    try:
        reach(*endpoint, _KNOCK)[0].close()
    except OSError:
        return False
    return True
