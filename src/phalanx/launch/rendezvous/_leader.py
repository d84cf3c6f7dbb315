"""Leads, on top of following: observes all nodes, asks ``decide`` and carries it out.

Owns the leader's view of live nodes and the writes that form or end a generation. Every write is safe to
repeat and safe beside another leader's: generation records are written once, ends and reasons too (the first
one wins).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.comm.stores._interface import Change, Store
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import Signer
from phalanx.launch.rendezvous._decide import End, Form, Idle, Rules, Seen, State, admissible, decide
from phalanx.launch.rendezvous._interface import GenerationEnd, RendezvousInfo, RendezvousStoreInfo
from phalanx.launch.rendezvous._store_records import (
    END_KEYS,
    KEEP,
    end_generation,
    read_record,
    ring,
    write_once,
)
from phalanx.protocol import (
    FORMED,
    NODES,
    WAITING,
    Broken,
    Members,
    NodeRecord,
    RecordError,
    dump_count,
    members_key,
    stage_key,
    wanted_key,
)

log = logging.getLogger(__name__)


@dataclass
class NodeView:
    """What this node knows, in the words of its agent. Only grows; ``handler`` threads wait for it to
    change."""

    latest: Members | None = None
    ends: dict[int, GenerationEnd] = field(default_factory=dict)
    closed: str = ""
    """Why the job is over, or ""."""
    outcome: str = ""
    """How it ended, if who closed it said so: ``succeeded`` or ``failed``."""
    evicted: bool = False
    """This node's lease ran out; it has to register again."""


def describe(members: Members, rank: int, store: Store) -> RendezvousInfo:
    """Return a generation as the node at ``rank`` hands it to its agent."""
    return RendezvousInfo(
        store=store,
        rank=rank,
        world_size=members.num_nodes,
        generation=members.generation,
        nodes=members.node_infos,
        agreed=members,
        bootstrap_store_info=RendezvousStoreInfo(master_addr=members.master_addr, master_port=members.master_port),
    )


class Leader:
    """The view and the hands of the leader; ``Participant`` makes one when its node is chosen."""

    def __init__(self, store: Store, signer: Signer, rules: Rules, *, patience: float) -> None:
        """``patience``: seconds that a node has to put its record right when a stranger wrote over it."""
        self._store = store
        self._signer = signer
        self._rules = rules
        self._patience = patience
        self._overwritten: dict[str, float] = {}
        self._nodes: dict[str, Seen] = {}
        self._raw: dict[str, bytes] = {}
        self._waiting: int | None = None
        self._done: tuple[int, frozenset[int]] = (-1, frozenset())
        """A generation, and the ranks of it that are known to be done."""

    def read_all(self, facts: NodeView, now: float) -> None:
        """Learn the nodes anew; also puts right what a stranger did to the record of the generation."""
        found = self._store.items(NODES)
        gone = [Change(key, None) for key in self._raw if key not in found]
        self.observe([*gone, *(Change(key, value) for key, value in found.items())], now)
        if facts.latest is not None:
            key = members_key(facts.latest.generation)
            if read_record(self._store, self._signer, key, Members) is None:
                write_once(self._store, self._signer, key, facts.latest)

    def observe(self, changes: Iterable[Change], now: float) -> None:
        """Take in changes of node records."""
        for change in changes:
            if not change.key.startswith(NODES):
                continue
            node_id = change.key[len(NODES) :]
            if change.value is None:
                self._raw.pop(change.key, None)
                self._nodes.pop(node_id, None)
                self._overwritten.pop(node_id, None)
            elif change.value != self._raw.get(change.key):
                self._raw[change.key] = change.value
                self._take_node(node_id, change.key, change.value, now)

    def _take_node(self, node_id: str, key: str, value: bytes, now: float) -> None:
        try:
            record = NodeRecord.from_json(self._signer.open(key, value))
            if record.id != node_id:
                raise RecordError(f"it names node {record.id!r}")
        except RecordError as error:
            self._signer.complain(key, f"refused the join of node {node_id}: {error}")
            if node_id in self._nodes and node_id not in self._overwritten:
                # It has joined, so this is not its word. Its lease does not hold the key any more either: it may have
                # died, and has until then to write its record again.
                self._overwritten[node_id] = now + self._patience
                ring(self._store, self._signer)
            return
        self._overwritten.pop(node_id, None)
        known = self._nodes.get(node_id)
        same = known is not None and (known.record.ticket, known.record.wants) == (
            record.ticket,
            record.wants,
        )
        self._nodes[node_id] = Seen(record, known.since if known is not None and same else now)

    def lead(self, facts: NodeView, now: float) -> float:
        """Decide and act until there is nothing to do; returns when to look again at the latest."""
        for node_id in [each for each, until in self._overwritten.items() if until <= now]:
            del self._overwritten[node_id]
            self._nodes.pop(node_id, None)
        while True:
            state = self._state(facts)
            action = decide(state, self._rules, now)
            if isinstance(action, Form):
                self._form(action.members, facts)
            elif isinstance(action, End) and self._learn_done(facts):
                continue  # some of its nodes have finished: that may be all there is to it
            elif isinstance(action, End) and not self._is_wanted(action, facts):
                log.info("generation %d is %s: %s", action.generation, action.kind, action.cause.reason)
                end_generation(self._store, self._signer, action.generation, action.kind, action.cause)
                facts.ends[action.generation] = GenerationEnd(
                    kind=action.kind, reason=action.cause.reason, broken=action.cause
                )
            elif isinstance(action, Idle):
                self._tell_waiting(state)
                until = math.inf if action.until is None else action.until
                return min(until, *self._overwritten.values(), math.inf)

    def _learn_done(self, facts: NodeView) -> bool:
        """Look which nodes of the generation have said that they are done; whether that is news."""
        assert facts.latest is not None, "only a generation can end"
        number, before = facts.latest.generation, self._known_done(facts)
        keys = [stage_key("done", number, rank) for rank in range(len(facts.latest.nodes))]
        found = SealedStore(self._store, self._signer).get_many(keys)
        self._done = number, frozenset(rank for rank, value in enumerate(found) if value is not None)
        return self._done[1] != before

    def _known_done(self, facts: NodeView) -> frozenset[int]:
        is_current = facts.latest is not None and facts.latest.generation == self._done[0]
        return self._done[1] if is_current else frozenset()

    def _is_wanted(self, action: End, facts: NodeView) -> bool:
        """Return whether an agent or worker asked for a new generation by ``wanted_key`` alone: then members that
        left did so on request, and the generation need not be broken for it."""
        if action.generation in facts.ends:
            return False
        cause = read_record(self._store, self._signer, wanted_key(action.generation), Broken)
        if cause is None:
            return False
        facts.ends[action.generation] = GenerationEnd(kind="wanted", reason=cause.reason, broken=cause)
        ring(self._store, self._signer)  # whoever wrote it may not have
        return True

    def _state(self, facts: NodeView) -> State:
        end = None if facts.latest is None else facts.ends.get(facts.latest.generation)
        return State(
            nodes=self._nodes,
            current=facts.latest,
            ended="" if end is None else end.kind,
            closed=bool(facts.closed),
            done=self._known_done(facts),
        )

    def _form(self, members: Members, facts: NodeView) -> None:
        key = members_key(members.generation)
        while not write_once(self._store, self._signer, key, members):
            taken = read_record(self._store, self._signer, key, Members)
            if taken is not None:  # else a stranger was at it in between
                members = taken
                break
        self._store.set(FORMED, self._signer.seal(FORMED, dump_count(members.generation)))
        ring(self._store, self._signer)
        facts.latest = members
        log.info("generation %d formed with %d node(s)", members.generation, members.num_nodes)
        self._forget(members.generation - KEEP)

    def _forget(self, generation: int) -> None:
        if generation < 0:
            return
        key = members_key(generation)
        self._store.set(key, self._signer.seal(key, Members.forgotten(generation).to_json()))
        for end_key in END_KEYS.values():
            self._store.delete(end_key(generation))

    def _tell_waiting(self, state: State) -> None:
        count = 0 if state.ended == "broken" else admissible(state, self._rules)
        if count != self._waiting and (count or self._waiting):
            self._store.set(WAITING, self._signer.seal(WAITING, dump_count(count)))
        self._waiting = count
