"""Holds the doors of a job's own etcd: small TCP stores at the endpoint's places that say where the cluster is.

Owns what is written there: one record of the cluster, and a sign of life of each node that waits for it. Decisions are
``_etcd_founding``'s. Whoever has a member tells every door, again and again (``Herald``): an agent whose machine was
lost and returns finds the record in its own new door, and a newcomer at any other. That goes on while the cluster
elects a leader, because it needs no answer of etcd.
"""

from __future__ import annotations

import json
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
from phalanx.launch.rendezvous._etcd_founding import (
    ClusterRecord,
    Founding,
    RecordChoice,
    decide_founding,
    decide_telling,
)
from phalanx.launch.rendezvous._interface import RendezvousConnectionError
from phalanx.protocol import RecordError

log = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds for a cluster that lives to say so at a door that has been opened anew."""
TELL = 0.5
"""Seconds between two rounds of a member to all doors."""
DOOR = "phalanx/door"
_CLUSTER = "phalanx/etcd"
_FRESH = "phalanx/fresh/"
_FRESH_TTL = 5.0
"""Seconds after which a node that waited at a door and was lost is no longer counted."""
_LOOK = 0.1
_KNOCK = 0.5
"""Seconds for a machine with a door to answer."""

Door = tuple[str, int]
Answers = Callable[[ClusterRecord], bool]


class DiscoveryBoard:
    """Reads and writes what the doors of a job say, for the node ``node``. Not for several threads at once."""

    def __init__(self, doors: Sequence[Door], signer: Signer, node: str) -> None:
        self._doors = list(doors)
        self._signer = signer
        self._node = node
        self._clients: dict[Door, Store] = {}
        self._served: Store | None = None
        self._has_refused = False  # a record that was not signed with this job's secret: waiting long is no use
        self._place: tuple[Store, Lease, float] | None = None  # where this node has signed, and when it does so again

    def serve(self, store: Store) -> None:
        """Keep the door that this agent has opened open."""
        self._served = store

    # -- looking for the cluster ---------------------------------------------------------------------------------

    def wait_as_first(self, offer: ClusterRecord, *, min_nodes: int, timeout: float) -> ClusterRecord:
        """Return where the cluster is, for the agent at the first door: ``offer`` when it is to begin that one."""
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
        """Ask all doors until one knows: ``reach`` seconds for one that is open, ``timeout`` in all."""
        began = time.monotonic()
        is_open = False
        try:
            while time.monotonic() < began + (timeout if is_open else reach):
                for door in self._doors:
                    client = self._client(door)
                    found = None if client is None else self._ask(door, client)
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
        """Take a record out of this agent's own door: that cluster does not answer. If it lives, it says so again."""
        if self._served is not None and self._read(self._served) == record:
            self._served.delete(_CLUSTER)

    def _claim(self, store: Store, offer: ClusterRecord) -> bool:
        """Write the record of a new cluster where none is: one that lives may have told this door just now."""
        raw = store.get(_CLUSTER)
        return self._open(raw) is None and store.compare_and_set(_CLUSTER, raw, self._sealed(offer))

    def _ask_others(self) -> ClusterRecord | None:
        for door in self._doors[1:]:
            client = self._client(door)
            found = None if client is None else self._ask(door, client)
            if found is not None:
                return found
        return None

    def _sign(self) -> bool:
        """Say at the first door that this node waits and knows of no cluster; False when it is not open."""
        door = self._doors[0]
        client = self._client(door)
        if client is None:
            return False
        try:
            if self._place is None or self._place[0] is not client:
                key, lease = f"{_FRESH}{self._node}", client.lease(_FRESH_TTL)
                client.set(key, self._signer.seal(key, b"{}"), lease=lease)
                self._place = (client, lease, time.monotonic() + _FRESH_TTL / 4)
            elif time.monotonic() >= self._place[2]:
                kept = self._place[1].refresh()
                self._place = (client, self._place[1], time.monotonic() + _FRESH_TTL / 4) if kept else None
        except StoreError:
            self._drop(door)
            return False
        return True

    def _strike_out(self) -> None:
        if self._place is not None:
            with suppress(StoreError):
                self._place[1].revoke()
            self._place = None

    def _count_fresh(self, store: Store) -> int:
        """Return how many nodes wait for a cluster at the door that this one holds, with this one."""
        return 1 + sum(self._signer.opens(key, value) for key, value in store.items(_FRESH).items())

    # -- telling of it -------------------------------------------------------------------------------------------

    def tell(self, own: ClusterRecord, *, acts: bool, answers: Answers) -> ClusterRecord | None:
        """Tell every door that is open of this node's cluster; returns an elder one that lives, if a door knows it."""
        for door in self._doors:
            if not _is_open(door):  # a client would wait long for a machine that is gone
                self._drop(door)
            elif (elder := self._tell_endpoint(door, own, acts, answers)) is not None:
                return elder
        return None

    def _tell_endpoint(self, door: Door, own: ClusterRecord, acts: bool, answers: Answers) -> ClusterRecord | None:
        for _ in range(2):  # a client may be one of a server that is gone, while there is another now
            client = self._client(door)
            if client is None:
                break
            try:
                found = self._read(client)
                action = decide_telling(own, found, acts=acts, answers=answers)
                if action is RecordChoice.WRITE:
                    client.set(_CLUSTER, self._sealed(own))
                return found if action is RecordChoice.GIVE_UP else None
            except StoreError:
                self._drop(door)
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
        return ", ".join(f"{host}:{port}" for host, port in self._doors)

    def _client(self, door: Door) -> Store | None:
        """Return a client of the store at a door, if it is open. torch's client would wait for it: knock first."""
        if door not in self._clients:
            if not _is_open(door):
                return None
            try:
                store = stores.TCPStore(*door, timeout=5.0)
                if store.get(DOOR) is None:  # somebody else's, such as that of an agent without an etcd of its own
                    store.close()
                    return None
            except StoreError:
                return None
            self._clients[door] = store
        return self._clients[door]

    def _ask(self, door: Door, client: Store) -> ClusterRecord | None:
        try:
            return self._read(client)
        except StoreError:
            self._drop(door)
            return None

    def _drop(self, door: Door) -> None:
        if door in self._clients:
            self._clients.pop(door).close()

    def _sealed(self, record: ClusterRecord) -> bytes:
        told = {"v": 1, "founder": record.founder, "began": record.began, "members": list(record.members)}
        return self._signer.seal(_CLUSTER, json.dumps(told).encode())

    def _read(self, store: Store) -> ClusterRecord | None:
        return self._open(store.get(_CLUSTER))

    def _open(self, raw: bytes | None) -> ClusterRecord | None:
        """Return the record; None for what is none or a stranger's."""
        if raw is None:
            return None
        try:
            told = json.loads(self._signer.open(_CLUSTER, raw))
            members = tuple(str(each) for each in told["members"])
            found = ClusterRecord(founder=str(told["founder"]), began=float(told["began"]), members=members)
        except (RecordError, ValueError, TypeError, KeyError) as error:
            self._signer.complain(_CLUSTER, f"refused a record: {error!r}")
            self._has_refused = True
            return None
        return found if members else None


class Herald:
    """Tells the doors of this node's cluster, in a thread, as long as ``record`` returns one (None: this node has no
    member); the second value says whether this node acts. ``give_up`` hears of an elder cluster, once."""

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


def _is_open(door: Door) -> bool:
    try:
        reach(*door, _KNOCK)[0].close()
    except OSError:
        return False
    return True
