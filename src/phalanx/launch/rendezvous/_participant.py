"""One node's side of the rendezvous: registers it, follows the news and, when it is its turn, leads.

Guarantees:
- Two leaders cannot publish two memberships for one generation: the record is written by compare-and-set from
  absent, and stays taken for ever. A leader that was paused and wakes up can at worst publish a valid but outdated
  membership (which is then broken, because a member is gone) or end a generation needlessly.
- A node's lease runs out at most ``lease / 2`` after it was last heard of; the leader acts at once, and if it was
  the leader, another node takes over after at most ``lease / 4`` more.
- A node that lost its lease gets a new ticket when it registers again, so it is never mistaken for its former self,
  even if nobody saw it gone.

Assumptions: ``step`` is called by one thread, ``now`` never goes back. Nothing here blocks except on store calls.

Rejected: one record that all nodes rewrite (contention grows with nodes); all nodes watching all nodes (n² messages);
a leader chosen by the lowest ticket (finding it after a death makes every node read every record).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from phalanx.comm.stores._interface import Change, Lease, Store, Watch
from phalanx.errors import StoreError, StoreLost
from phalanx.launch.rendezvous import _records as records
from phalanx.launch.rendezvous._interface import GenerationEnd
from phalanx.launch.rendezvous._leader import Leader
from phalanx.launch.rendezvous._decide import Rules
from phalanx.launch.rendezvous._records import GenerationRecord, LeaderRecord, NodeRecord
from phalanx.launch.rendezvous._signing import Signer
from phalanx.membership import Broken, RecordError, broken_key, wanted_key

log = logging.getLogger(__name__)


@dataclass
class Facts:
    """What this node knows, in the words of its agent. Only grows; ``handler`` threads wait for it to change."""

    latest: GenerationRecord | None = None
    ends: dict[int, GenerationEnd] = field(default_factory=dict)
    closed: str = ""
    """Why the job is over, or ""."""
    evicted: bool = False
    """This node's lease ran out; it has to register again."""
    passed_over: bool = False
    """A generation formed without this node while it waited: it is a spare."""


class Participant:
    """Drives one node by ``register`` and repeated ``step`` calls; the handler adds the thread."""

    def __init__(
        self,
        store: Store,
        signer: Signer,
        rules: Rules,
        node: NodeRecord,
        *,
        lease: float,
        jitter: float | None = None,
    ) -> None:
        self.store = store
        self.signer = signer
        self.rules = rules
        self.node = node
        self.facts = Facts()
        self.watch: Watch | None = None
        self.leader: Leader | None = None
        self._ttl = lease / 2
        self._lease: Lease | None = None
        self._refresh_at = 0.0
        self._check_at = 0.0
        # Spread over time, so that the followers of a large job do not all ask in the same instant.
        self._jitter = random.random() if jitter is None else jitter
        self._leader: LeaderRecord | None = None
        self._leader_raw: bytes | None = None

    # -- what the agent's thread calls ---------------------------------------------------------------------------

    def register(self, wants: int, port: int, now: float) -> None:
        """Become (again) a live node that wants a generation numbered at least ``wants``."""
        if self._lease is None or self.facts.evicted:
            self._lease = self.store.lease(self._ttl)
            self._refresh_at = now + self._ttl / 3
            self.node = replace(self.node, ticket=self.store.add(records.TICKETS))
            self.facts.evicted = False
        self.node = self.node.rejoin(wants, port)
        self._write_node()
        if self.watch is None:
            self.watch = self.store.watch(records.NEWS)
            self._read_news(now)
            self._check(now)
        self.facts.passed_over = False

    def leave(self) -> None:
        """Stop being a live node; a leader tells the others to find a new one."""
        if self.leader is not None and not self.facts.closed:
            self.store.delete(records.LEADER)
        self.leader = None
        if self._lease is not None:
            self._lease.revoke()
            self._lease = None
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def seat(self, wants: int) -> tuple[GenerationRecord, int] | None:
        """The generation, numbered at least ``wants``, that this registration is a member of, and its rank."""
        latest = self.facts.latest
        if latest is None or latest.generation < wants:
            return None
        rank = latest.rank_of(self.node.id, self.node.ticket)
        return None if rank is None else (latest, rank)

    # -- what the background thread calls ------------------------------------------------------------------------

    def step(self, changes: Iterable[Change], now: float) -> float:
        """Take in ``changes`` of ``watch``, do what is due, and return when to be called again at the latest."""
        changes = list(changes)
        for change in changes:
            self._take_news(change, now)
        if now >= self._refresh_at:
            self._refresh(now)
        if now >= self._check_at:
            self._check(now)
        until = min(self._refresh_at, self._check_at)
        if self.leader is not None:
            self.leader.observe(changes, now)
            until = min(until, self.leader.lead(self.facts, now))
        return until

    def _refresh(self, now: float) -> None:
        self._refresh_at = now + self._ttl / 3
        if self._lease is not None and not self.facts.evicted and not self._lease.refresh():
            log.warning("node %s: its lease of %g s ran out; was the process stopped?", self.node.id, self._ttl)
            self.facts.evicted = True
            self.leader = None  # the others will have chosen another

    def _write_node(self) -> None:
        key = records.node_key(self.node.id)
        try:
            self.store.set(key, self.signer.seal(key, self.node.to_json()), lease=self._lease)
        except StoreLost:
            raise
        except StoreError:
            self.facts.evicted = True  # the lease ran out just now; whoever waits registers again

    # -- news ----------------------------------------------------------------------------------------------------

    def _read_news(self, now: float) -> None:
        for key, value in self.store.items(records.NEWS).items():
            self._take_news(Change(key, value), now)

    def _take_news(self, change: Change, now: float) -> None:
        key, value = change.key, change.value
        if not key.startswith(records.NEWS):
            return
        try:
            if key == records.LEADER:
                self._take_leader(value, now)
            elif value is None:
                return
            elif key == records.FORMED:
                self._take_formed(int(records.load(self.signer.open(key, value), key)))
            elif key == records.CLOSED:
                self.facts.closed = str(records.load(self.signer.open(key, value), key))
            elif key.startswith(records.ENDED):
                number, _, kind = key[len(records.ENDED) :].partition("/")
                self._take_end(int(number), kind, Broken.from_json(self.signer.open(key, value)))
        except RecordError as error:
            log.warning("node %s ignores a record: %s", self.node.id, error)

    def _take_formed(self, hint: int) -> None:
        """Read the newest generation; the hint may be behind when its writer was slow or died."""
        known = -1 if self.facts.latest is None else self.facts.latest.generation
        number = max(hint, known + 1)
        while True:
            keys = [records.generation_key(number), records.generation_key(number + 1)]
            value, following = self.store.get_many(keys)
            if value is None or value == records.GONE:
                return
            self.facts.latest = GenerationRecord.from_json(self.signer.open(keys[0], value))
            self.facts.passed_over = self.seat(self.node.wants) is None
            if following is None:
                return
            number += 1

    def _take_end(self, generation: int, kind: str, cause: Broken) -> None:
        known = self.facts.ends.get(generation)
        if known is None or (known.kind == "wanted" and kind == "broken"):
            self.facts.ends[generation] = GenerationEnd(kind=kind, reason=cause.reason, broken=cause)

    # -- who leads -----------------------------------------------------------------------------------------------

    def _take_leader(self, value: bytes | None, now: float) -> None:
        """A new leader was announced, or (None) the old one has left."""
        self._leader_raw = value
        self._leader = None
        if value is not None:
            self._leader = LeaderRecord.from_json(self.signer.open(records.LEADER, value))
        mine = self._is_me(self._leader)
        if self.leader is not None and not mine:
            log.info("node %s no longer leads", self.node.id)
            self.leader = None
        if value is None:
            self._stand(now)

    def _is_me(self, leader: LeaderRecord | None) -> bool:
        return leader is not None and (leader.id, leader.ticket) == (self.node.id, self.node.ticket)

    def _check(self, now: float) -> None:
        """Look for what the news did not tell: a leader that died, or died before it could announce."""
        self._check_at = now + self._ttl / 4 * (1 + self._jitter)
        latest = self.facts.latest
        current = -1 if latest is None else latest.generation
        leader_id = self._leader.id if self._leader is not None else ""
        keys = [
            records.LEADER,
            records.node_key(leader_id),
            records.generation_key(current + 1),
            broken_key(current),
            wanted_key(current),
        ]
        leader, leader_node, following, broken, wanted = self.store.get_many(keys)
        if leader != self._leader_raw:
            self._take_news(Change(records.LEADER, leader), now)
        elif leader is None or not self._alive(leader_node):
            self._stand(now)
        if following is not None:
            self._take_formed(current + 1)
        for kind, value in (("broken", broken), ("wanted", wanted)):
            if value is not None:  # written by someone who is not an agent
                self._take_end(current, kind, Broken.from_json(value))
        if self.leader is not None:
            self.leader.read_all(self.facts, now)

    def _alive(self, leader_node: bytes | None) -> bool:
        """Whether the leader's node is still the registration that was chosen."""
        if leader_node is None or self._leader is None:
            return False
        try:
            node = NodeRecord.from_json(self.signer.open(records.node_key(self._leader.id), leader_node))
        except RecordError:
            return False
        return node.ticket == self._leader.ticket

    def _stand(self, now: float) -> None:
        """Try to become the leader in place of the one that was last seen."""
        if self._lease is None or self.facts.evicted:
            return
        mine = LeaderRecord(self.node.id, self.node.ticket, self.rules.min_nodes, self.rules.max_nodes)
        raw = self.signer.seal(records.LEADER, mine.to_json())
        if not self.store.compare_and_set(records.LEADER, self._leader_raw, raw):
            return  # another was quicker; the news will name it
        log.info("node %s leads", self.node.id)
        self._leader, self._leader_raw = mine, raw
        # Opened before everything is read, so that no change falls between the two.
        old, self.watch = self.watch, self.store.watch(records.ROOT)
        if old is not None:
            old.close()
        self.leader = Leader(self.store, self.signer, self.rules)
        for key, value in self.store.items(records.NEWS).items():
            if key != records.LEADER:
                self._take_news(Change(key, value), now)
        self.leader.read_all(self.facts, now)
