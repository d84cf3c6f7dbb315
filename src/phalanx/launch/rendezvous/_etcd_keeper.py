"""Keeps a job's own etcd: a thread of each agent that runs a member when asked, and replaces members that were lost.

Owns the offers of nodes and the requests to them. Decisions are ``_etcd_members``';
the process is ``_etcd_process``'. Only agents with a member look at who lives, and only the first of them acts; the
others wait for one key each, so that a large job costs its store nothing.

Guarantees: a learner is promoted only when etcd says that it has caught up, so that no change costs the majority. A
node that leaves is taken out by one that stays, one after the other: etcd takes one change at a time, and drops the
next. The data of a member is gone with its agent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.comm._background import FOREVER, Background
from phalanx.comm.stores._etcd import EtcdStore
from phalanx.comm.stores._etcd_gateway import EtcdError
from phalanx.comm.stores._interface import Watch
from phalanx.comm.stores._signing import Signer
from phalanx.errors import StoreError
from phalanx.launch.rendezvous._etcd_members import (
    EtcdMember,
    MemberChange,
    Offer,
    acting_node,
    initial_cluster,
    next_change,
    read_members,
)
from phalanx.launch.rendezvous._etcd_process import MemberProcess
from phalanx.launch.rendezvous._store_records import open_record, read_record
from phalanx.protocol import (
    NODES,
    ClusterRecord,
    EtcdOffer,
    EtcdRequest,
    NodeRecord,
    StoreRecord,
    etcd_offer_key,
    etcd_request_key,
    job_prefix,
)

log = logging.getLogger(__name__)

_LOOK = 1.0
"""Seconds between two looks of a member at its cluster, should nothing wake it."""
_SOON = 0.1
_SLICE = 0.1
"""Seconds after which the thread notices that it is to leave."""
_CANDIDATES = 16
_START_PATIENCE = 60.0
"""Seconds for a node to start a member and have it catch up."""
_PART_PATIENCE = 15.0
"""Seconds for the others to take a member out; etcd wants them to have been in contact for 5 s first."""


class EtcdKeeper:
    """Runs this node's part of the cluster that ``etcd`` is a client of; ``close`` ends what else belongs to it."""

    def __init__(
        self,
        process: MemberProcess,
        etcd: EtcdStore,
        job: str,
        signer: Signer,
        *,
        size: int,
        endpoint: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._process = process
        self._etcd = etcd
        self._store = etcd.namespace(job_prefix(job))
        self._gateway = etcd.gateway()
        self._signer = signer
        self.endpoint = endpoint
        """How the job's etcd is found, in the words of ``--rdzv-endpoint``."""
        self.size = size
        self._close_rest = close
        self._node = process.offer.node
        self._handled = b""  # the request that this node has followed
        self._unfit: set[str] = set()
        self._since: dict[str, float] = {}  # when this node first saw a learner
        self._num_voters = 1
        self.acts = False
        """Whether this node makes the changes, and so knows best who the members are."""
        self._leaving, self._parted = threading.Event(), threading.Event()
        self._has_parted = False
        self._thread = Background(self._run, "phalanx-etcd-keeper", on_failure=self._fail, attempts=FOREVER)

    def start(self, *, offers: bool = True) -> None:
        """Begin; ``offers``: this node can run a member."""
        if offers:
            self._offer()
        self._thread.start()

    def _offer(self, *, leaves: bool = False) -> None:
        offer = self._process.offer
        self._write(etcd_offer_key(self._node), EtcdOffer(peer=offer.peer, client=offer.client, leaves=leaves))

    def describe(self) -> str:
        """Say what the loss of nodes means for the store."""
        return (
            f"on the first {self.size} nodes: it survives the loss of {self.size // 2} at once, and what is lost is "
            "replaced on other nodes; with fewer than three nodes it is on one, whose loss ends the job"
        )

    @property
    def is_sole(self) -> bool:
        """Whether the store ends with this node's member."""
        return self._process.is_started and self._num_voters <= 1

    @property
    def is_member(self) -> bool:
        """Whether this node has a member of the cluster."""
        return self._process.is_started

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the members are, as far as this node knows."""
        return self._gateway.endpoints

    def url(self, template: str) -> str:
        """Return ``template``, an address of the cluster, with the members that are known now."""
        scheme, _, rest = template.partition("://")
        return f"{scheme}://{','.join(self._gateway.endpoints)}?{rest.partition('?')[2]}"

    def part(self) -> bool:
        """Take this node's member out of the cluster; False when it has the only vote, and must stay or be missed."""
        self._leaving.set()
        self._parted.wait(_PART_PATIENCE + 5.0)
        return self._has_parted

    def close(self) -> None:
        """End this node's member, and remove its data."""
        self._parted.set()
        self._leaving.set()
        self._etcd.hurry()
        self._process.stop()
        if self._thread.has_started:
            self._thread.join(60.0)
        self._process.close()
        self._gateway.close()
        self._etcd.close()
        self._close_rest()

    def give_up(self, elder: ClusterRecord) -> None:
        """End this node's member, and with it this cluster: the job has an elder one. All agents that use this one
        lose their store, and can be started again."""
        log.error(
            "node %s gives its etcd up: an elder one of this job lives at %s, begun by node %s. This one was begun "
            "while the two could not reach each other; start this node's agent again",
            *(self._node, ", ".join(elder.members), elder.founder),
        )
        self._parted.set()
        self._leaving.set()
        self._etcd.hurry()
        self._process.stop()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving.is_set():
            was_member = self._process.is_started
            try:
                with self._open_watch() as watch:
                    while not self._leaving.is_set() and self._process.is_started == was_member:
                        self._pause(watch, self._step())
            except StoreError as error:
                log.debug("node %s cannot look after its etcd: %s", self._node, error)
                self._restart_if_ended()
                self._leaving.wait(_LOOK)
        if not self._parted.is_set():
            self._has_parted = self._part()
            self._parted.set()

    def _fail(self, error: BaseException) -> None:
        log.error("node %s no longer looks after its etcd: %r", self._node, error)
        self._parted.set()

    def _open_watch(self) -> Watch:
        return self._store.watch(NODES if self._process.is_started else etcd_request_key(self._node))

    def _pause(self, watch: Watch, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._leaving.is_set() and (left := deadline - time.monotonic()) > 0:
            if watch.wait(min(_SLICE, left)):
                return

    def _step(self) -> float:
        """Do what is due, and return how long there is nothing else to do."""
        if not self._process.is_started:
            self._start_if_asked()
            return 0.0 if self._process.is_started else 10 * _LOOK  # it may be for this node to act now
        if self._process.has_ended and self._is_removed():
            log.warning("the etcd member of node %s was taken out of the cluster", self._node)
            self._process.stop()
            return 0.0
        self._restart_if_ended()
        try:
            return self._tend()
        except StoreError as error:  # too early, or another was quicker, or there is no majority
            log.debug("node %s: %s", self._node, error)
            return _SOON if isinstance(error, EtcdError) else _LOOK

    def _start_if_asked(self) -> None:
        key = etcd_request_key(self._node)
        raw = self._store.get(key)
        if raw is None or raw == self._handled:
            return
        self._handled = raw
        request = open_record(self._signer, key, raw, EtcdRequest)
        if request is not None:
            log.info("node %s runs a member of the job's etcd", self._node)
            try:
                self._process.start(request.cluster, is_new=False)
            except OSError as error:
                log.warning("node %s cannot run a member of the job's etcd: %s", self._node, error)

    def _is_removed(self) -> bool:
        return self._process.offer.peer not in {member.peer for member in self._members()}

    def _restart_if_ended(self) -> None:
        if self._process.has_ended and not self._leaving.is_set():
            log.warning(
                "the etcd member of node %s ended: %s; starting it again", self._node, self._process.last_words()
            )
            self._process.start_again()
            self._leaving.wait(_LOOK)

    # -- members -------------------------------------------------------------------------------------------------

    def _tend(self) -> float:
        members = self._members()
        living = self._living(members)
        self._num_voters = sum(not member.is_learner for member in members)
        self.acts = acting_node(members, living) == self._node
        if not self.acts:
            return _LOOK
        self._judge_learners(members)
        change = next_change(members, living, self.size, self._unfit, self._leaving_nodes(members, living))
        if change is None:
            return _LOOK
        self._make(change, members, living)
        return _SOON

    def _members(self) -> list[EtcdMember]:
        """Ask etcd who its members are; this agent's clients learn of it too."""
        answer = self._call("member/list", {"linearizable": True})
        self._gateway.learn(answer)
        return read_members(answer)

    def _living(self, members: Sequence[EtcdMember]) -> list[Offer]:
        """Return the offers of nodes that take part, as they came: of members, and of the first others."""
        found = self._store.items(NODES)
        records = [open_record(self._signer, key, value, NodeRecord) for key, value in found.items()]
        nodes = sorted((record for record in records if record is not None), key=lambda record: record.ticket)
        names = {member.node for member in members}
        chosen = nodes[:_CANDIDATES] + [node for node in nodes[_CANDIDATES:] if node.id in names]
        keys = [etcd_offer_key(node.id) for node in chosen]
        offers = []
        for node, key, raw in zip(chosen, keys, self._store.get_many(keys), strict=True):
            told = open_record(self._signer, key, raw, EtcdOffer)
            if told is not None:
                offers.append(Offer(node=node.id, peer=told.peer, client=told.client))
        return offers

    def _leaving_nodes(self, members: Sequence[EtcdMember], living: Sequence[Offer]) -> set[str]:
        """Return the nodes that have said that they leave, and still have a member."""
        staying = {offer.peer for offer in living}
        nodes = [member.node for member in members if member.node and member.peer not in staying]
        keys = [etcd_offer_key(node) for node in nodes]
        found = zip(nodes, keys, self._store.get_many(keys) if keys else [], strict=True)
        told = {node: open_record(self._signer, key, raw, EtcdOffer) for node, key, raw in found}
        return {node for node, offer in told.items() if offer is not None and offer.leaves}

    def _judge_learners(self, members: Sequence[EtcdMember]) -> None:
        now = time.monotonic()
        self._since = {member.id: self._since.get(member.id, now) for member in members if member.is_learner}

    def _make(self, change: MemberChange, members: Sequence[EtcdMember], living: Sequence[Offer]) -> None:
        if change.add is not None:
            answer = self._call("member/add", {"peerURLs": [change.add.peer], "isLearner": True})
            self._ask(change.add, read_members(answer))
        elif change.promote is not None:
            offer = next(each for each in living if each.peer == change.promote.peer)
            if not change.promote.node:
                self._ask(offer, members)
            if time.monotonic() > self._since[change.promote.id] + _START_PATIENCE:
                log.warning("node %s has not started its etcd member in %g s", offer.node, _START_PATIENCE)
                self._unfit.add(offer.node)
            self._call("member/promote", {"ID": change.promote.id})
            log.info("node %s has a member of the job's etcd", offer.node)
        elif change.remove is not None:
            name = change.remove.node or change.remove.peer
            log.warning("the etcd member of node %s is taken out: %s", name, change.why)
            self._call("member/remove", {"ID": change.remove.id})

    def _ask(self, offer: Offer, members: Sequence[EtcdMember]) -> None:
        """Ask a node to start the member that was announced; nothing is written if it has been asked before."""
        key = etcd_request_key(offer.node)
        new = next(member for member in members if member.peer == offer.peer)
        asked = read_record(self._store, self._signer, key, EtcdRequest)
        if asked is None or asked.member != new.id:
            self._write(key, EtcdRequest(member=new.id, cluster=initial_cluster(members, offer)))

    def _part(self) -> bool:
        """Wait until those that stay have taken this node's member out; False when nobody stays who has a vote."""
        deadline = time.monotonic() + _PART_PATIENCE
        has_told = False
        while self._process.is_started and time.monotonic() < deadline:
            try:
                if not has_told:
                    self._offer(leaves=True)
                    has_told = True
                members = self._members()
                if self._process.offer.peer not in {member.peer for member in members}:
                    return True
                if acting_node(members, self._living(members)) in ("", self._node):
                    return False
            except StoreError as error:
                log.debug("node %s cannot see its etcd member taken out: %s", self._node, error)
            time.sleep(_SOON)
        return True

    def wait_until_alone(self, timeout: float) -> None:
        """Wait until no node takes part any more. When others that had a vote have ended first, so it is."""
        deadline = time.monotonic() + timeout
        self._etcd.hurry()
        try:
            while self._store.items(NODES) and time.monotonic() < deadline:
                time.sleep(_SOON)
        except StoreError as error:
            log.debug("node %s: the others have ended: %s", self._node, error)

    # -- records -------------------------------------------------------------------------------------------------

    def _call(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._gateway.call(f"/v3/cluster/{what}", body, patience=0.0)

    def _write(self, key: str, record: StoreRecord) -> None:
        self._store.set(key, self._signer.seal(key, record.to_json()))
