"""Takes part in the rendezvous for one node: registers it, follows the news and, when it is its turn, leads.

Guarantees:
- Two leaders cannot publish two memberships for one generation: the record is written by compare-and-set from
  absent, and stays taken for ever. A leader that was paused and wakes up can at worst publish a valid but
  outdated membership (which is then broken, because a member is gone) or end a generation needlessly.
- A node's lease runs out at most ``lease / 2`` after it was last heard of; the leader acts at once, and if it
  was the leader, another node takes over after at most ``lease / 4`` more.
- A node that lost its lease gets a new ticket when it registers again, so it is never mistaken for its former
  self, even if nobody saw it gone.

Assumptions: ``step`` is called by one thread, ``now`` never goes back. Nothing here blocks except on store
calls.

Rejected: one record that all nodes rewrite (contention grows with nodes); all nodes watching all nodes (n²
messages); a leader chosen by the lowest ticket (finding it after a death makes every node read every record).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from phalanx.comm.stores._interface import Change, Lease, Store, Watch
from phalanx.comm.stores._polling import LONGEST
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import SignatureError, Signer
from phalanx.errors import StoreError, StoreLost, StoreTimeout
from phalanx.launch.rendezvous._decide import Rules
from phalanx.launch.rendezvous._interface import GenerationEnd
from phalanx.launch.rendezvous._leader import Leader, NodeView
from phalanx.launch.rendezvous._store_records import END_KEYS, open_record, read_record, ring
from phalanx.protocol import (
    BELLS,
    CLOSED,
    FORMED,
    LEADER,
    LIVE,
    NODES,
    TICKETS,
    Broken,
    Closing,
    LeaderRecord,
    MemberNode,
    Members,
    NodeRecord,
    RecordError,
    bell_key,
    members_key,
    node_key,
    parse_count,
    timeouts,
)

_CHANCE = random.SystemRandom()  # not the global generator: that one belongs to the training script

log = logging.getLogger(__name__)


T = TypeVar("T")


class Participant:
    """Drives one node by ``register`` and repeated ``step`` and ``pause``; the handler adds the thread."""

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
        self.facts = NodeView()
        self._ttl = lease / 2
        self._lease: Lease | None = None
        self._refresh_at = 0.0
        self._check_at = 0.0
        # Spread over time, so that the followers of a large job do not all ask in the same instant.
        self._jitter = _CHANCE.random() if jitter is None else jitter
        self._leader: LeaderRecord | None = None
        self._leader_raw: bytes | None = None
        self._leading: Leader | None = None
        self._watch: Watch | None = None
        self._changes: list[Change] = []
        self._sealed = SealedStore(store, signer)
        self._node_raw = b""  # what this node wrote last about itself
        self._bell = 0  # the one that was heard last
        self._ear = store.clone()  # a blocking call must not delay the agent's
        self._interrupted = threading.Event()
        self._heard = 0
        self._rung = False
        self._found: Members | None = None  # the newest one when this node came

    # -- what the agent's thread calls -----------------------------------------------------------------------

    def register(self, wants: int, port: int, now: float) -> None:
        """Become (again) a live node that wants a generation numbered at least ``wants``."""
        first = self._lease is None
        if first or self.facts.evicted:
            self._lease = self.store.lease(self._ttl)
            self._refresh_at = now + self._ttl / 3
            # A stranger may have set the counter back; what matters is that no registration has that of another.
            ticket = max(self._sealed.add(TICKETS), self.node.ticket + 1)
            self.node = replace(self.node, ticket=ticket)
            self.facts.evicted = False
        self.node = replace(self.node, wants=wants, port=port)
        self._write_node()
        if first:
            self._read_first(now)
            self._found = self.facts.latest

    def _read_first(self, now: float) -> None:
        """Find the newest generation and the leader, and make sure that this node can read their records."""
        values = self.store.get_many([FORMED, LEADER])
        formed = self._open_first(FORMED, values[0], lambda data: parse_count(data, FORMED))
        rules = self._open_first(LEADER, values[1], LeaderRecord.from_json)
        own = (self.rules.min_nodes, self.rules.max_nodes)
        if rules is not None and (rules.min_nodes, rules.max_nodes) != own:
            log.warning(
                "node %s was told %d to %d nodes, but the job's leader goes by %d to %d",
                *(self.node.id, *own),
                *(rules.min_nodes, rules.max_nodes),
            )
        if formed is not None:
            self._follow(formed)
        self._check(now)
        if self._leader is None:
            self._check(now)  # nobody led and another was quicker: now its name is there

    def _open_first(self, key: str, value: bytes | None, parse: Callable[[bytes], T]) -> T | None:
        """Open a record that this node finds when it comes. One that it cannot read is either a stranger's, and
        ignored, or this node is the stranger, and has to hear why."""
        if value is None:
            return None
        try:
            return parse(self.signer.open(key, value))
        except RecordError as error:
            is_garbage = self.signer.has_secret and not isinstance(error, SignatureError)
            if not is_garbage and not self._is_among_friends():
                raise
            self.signer.complain(key, f"refused a record: {error}")
            return None

    def _is_among_friends(self) -> bool:
        """Return whether another node's record can be trusted."""
        others = self.store.items(NODES)
        others.pop(node_key(self.node.id), None)
        return any(open_record(self.signer, key, value, NodeRecord) is not None for key, value in others.items())

    def leave(self) -> None:
        """Stop being a live node (which also wakes ``pause``); a leader tells the others to find a new
        one."""
        led = self._leading is not None
        self._step_down()
        if self._lease is not None:
            self._lease.revoke()
            self._lease = None
        if led and not self.facts.closed:
            self.store.delete(LEADER)
            ring(self.store, self.signer)

    def interrupt(self) -> None:
        """Give up the connection that a follower waits on: a thread in ``pause`` gets ``StoreLost``."""
        self._ear.close()
        self._interrupted.set()

    def close_watch(self) -> None:
        """Stop watching; only the thread that calls ``pause`` may do so."""
        if self._watch is not None:
            self._watch.close()

    def membership(self, wants: int) -> tuple[Members, int] | None:
        """Return the generation, numbered at least ``wants``, that this registration is a member of, and its
        rank."""
        latest = self.facts.latest
        if latest is None or latest.generation < wants:
            return None
        rank = latest.rank_of(self.node.id, self.node.ticket)
        return None if rank is None else (latest, rank)

    @property
    def is_spare(self) -> bool:
        """This node waits, and the newest generation that would suit it is without it."""
        latest, wants = self.facts.latest, self.node.wants
        return latest is not None and latest.generation >= wants and self.membership(wants) is None

    def holder_of_rank(self, waited: float) -> MemberNode | None:
        """Return the living node that has this one's fixed rank, if it is sure after so many seconds of waiting.

        Of a generation that formed while this node waited it is: another was chosen. One that was there
        before may name a dead predecessor, until any lease that it can have left has run out.
        """
        latest, rank = self.facts.latest, self.node.fixed_rank
        if rank < 0 or latest is None or not self.is_spare:
            return None
        if latest is self._found and waited <= self._ttl:
            return None
        holder = latest.nodes[rank]
        return holder if self._lives(holder, self.store.get(node_key(holder.id))) else None

    # -- what the background thread calls --------------------------------------------------------------------

    def pause(self, timeout: float) -> None:
        """Block until there may be something new for ``step``, at most ``timeout`` seconds."""
        if self._leading is not None and self._watch is not None:
            self._changes = self._watch.wait(timeout)
            self._rung = any(not change.key.startswith(NODES) for change in self._changes)
            return
        bell = self._heard + 1
        if bell == self._bell:  # it rang, yet nobody was counted: a stranger's, and it would ring for ever
            self.store.delete(bell_key(bell))
        try:
            self._hear(bell_key(bell), timeout)
            self._rung, self._bell = True, bell
        except StoreTimeout:
            self._rung, self._bell = False, 0

    def _hear(self, key: str, timeout: float) -> None:
        """Wait for a key; ``StoreTimeout`` when it does not come. Where the server cannot push, nodes of a large job
        ask it less often than the store's own wait would."""
        latest = self.facts.latest
        interval = timeouts.bell_interval(max(self.rules.min_nodes, 0 if latest is None else len(latest.nodes)))
        until = time.monotonic() + timeout
        while interval > LONGEST and not self._ear.pushes and (left := until - time.monotonic()) > 0:
            if self._ear.get(key) is not None:
                return
            self._interrupted.wait(min(interval, left))
        self._ear.wait([key], max(0.0, until - time.monotonic()))

    def step(self, now: float) -> float:
        """Do what is due, and return when to be called again at the latest."""
        if now >= self._refresh_at:
            self._refresh(now)
        if self._rung or now >= self._check_at:
            self._rung = False
            self._check(now)
        until = min(self._refresh_at, self._check_at)
        changes, self._changes = self._changes, []
        if self._leading is not None:
            self._leading.observe(changes, now)
            until = min(until, self._leading.lead(self.facts, now))
        return until

    def look_if_leading(self, now: float) -> None:
        """Do at once what this node, if it leads, would do when its watch shows it its own registration. Not beside
        ``step``: the caller sees to that."""
        if self._leading is not None:
            self._rung = True
            self.step(now)

    def _refresh(self, now: float) -> None:
        self._refresh_at = now + self._ttl / 3
        if self._lease is not None and not self.facts.evicted and not self._lease.refresh():
            log.warning("node %s: its lease of %g s ran out; was the process stopped?", self.node.id, self._ttl)
            self.facts.evicted = True
            self._step_down()  # the others will choose another

    def _write_node(self) -> None:
        key = node_key(self.node.id)
        try:
            self._node_raw = self.signer.seal(key, self.node.to_json())
            self.store.set(key, self._node_raw, lease=self._lease)
        except StoreLost:
            raise
        except StoreError:
            self.facts.evicted = True  # the lease ran out just now; whoever waits registers again

    def _check(self, now: float) -> None:
        """Read what all nodes want to know. After a ring, and now and then in case a ring was lost."""
        self._check_at = now + self._ttl / 4 * (1 + self._jitter)
        # The number first: what is written before a later ring is then read after hearing it.
        self._heard = self._sealed.count(BELLS)
        current = -1 if self.facts.latest is None else self.facts.latest.generation
        keys = [
            CLOSED,
            members_key(current + 1),
            LEADER,
            node_key("" if self._leader is None else self._leader.id),
            node_key(self.node.id),
        ]
        closed, following, leader, leader_node, own = self.store.get_many(keys)
        if self._lease is not None and not self.facts.evicted and own != self._node_raw:
            self._write_node()  # a stranger wrote over it or deleted it
        if closed is not None:
            self._take_closed(closed)
        if following is not None:
            self._follow(current + 1)
        self._read_ends()
        if leader != self._leader_raw:
            self._take_leader(leader, now)
        elif self._leader is None or not self._lives(self._leader, leader_node):
            self._stand(now)
        if self._leading is not None:
            self._leading.read_all(self.facts, now)

    def look_closed(self) -> None:
        """Learn whether the job is over; ``step`` does it for a node that takes part."""
        value = self.store.get(CLOSED)
        if value is not None:
            self._take_closed(value)

    def _take_closed(self, value: bytes) -> None:
        closing = open_record(self.signer, CLOSED, value, Closing)
        if closing is not None:
            self.facts.outcome, self.facts.closed = closing.outcome, closing.reason

    def _follow(self, number: int) -> None:
        """Read generation ``number`` and those after it; the last one is the newest."""
        while True:
            members = read_record(self.store, self.signer, members_key(number), Members)
            if members is None or members.is_forgotten:
                return
            self.facts.latest = members
            number += 1

    def _read_ends(self) -> None:
        if self.facts.latest is None:
            return
        generation = self.facts.latest.generation
        known = self.facts.ends.get(generation)
        if known is not None and known.kind == "broken":
            return
        keys = [end_key(generation) for end_key in END_KEYS.values()]
        for kind, key, value in zip(END_KEYS, keys, self.store.get_many(keys), strict=True):
            cause = open_record(self.signer, key, value, Broken)
            if cause is not None:
                self.facts.ends[generation] = GenerationEnd(kind=kind, reason=cause.reason, broken=cause)
                return

    # -- who leads -------------------------------------------------------------------------------------------

    def _take_leader(self, value: bytes | None, now: float) -> None:
        """Another leader than the one known: a new one, or (None) the old one has left."""
        former, self._leader_raw = self._leader_raw, value
        trusted = open_record(self.signer, LEADER, value, LeaderRecord)
        if value is not None and trusted is None:
            # A stranger's. Whoever leads goes on and puts it right; the others stand when that one has gone.
            if self._leading is not None and former is not None:
                if self.store.compare_and_set(LEADER, value, former):
                    self._leader_raw = former
            elif self._leader is None:
                self._stand(now)
            return
        self._leader = None
        self._step_down()
        if trusted is None:
            self._stand(now)
            return
        self._leader = trusted
        if self._leader.id == self.node.id:  # of a former registration of this node
            self._stand(now)

    def _lives(self, chosen: LeaderRecord | MemberNode, value: bytes | None) -> bool:
        """Return whether a node's record is still that of the registration that was chosen."""
        node = open_record(self.signer, node_key(chosen.id), value, NodeRecord)
        return node is not None and node.ticket == chosen.ticket

    def _stand(self, now: float) -> None:
        """Try to become the leader in place of the one that was last seen."""
        if self._lease is None or self.facts.evicted or self._leading is not None:
            return
        mine = LeaderRecord(self.node.id, self.node.ticket, self.rules.min_nodes, self.rules.max_nodes)
        raw = self.signer.seal(LEADER, mine.to_json())
        if not self.store.compare_and_set(LEADER, self._leader_raw, raw):
            return  # another was quicker; the next check finds it
        log.info("node %s leads", self.node.id)
        self._leader, self._leader_raw = mine, raw
        if self._watch is None:
            self._watch = self.store.watch(LIVE)  # before everything is read: nothing falls in between
        self._leading = Leader(self.store, self.signer, self.rules, patience=self._ttl)
        ring(self.store, self.signer)

    def _step_down(self) -> None:
        if self._leading is not None:
            log.info("node %s no longer leads", self.node.id)
        self._leading = None
