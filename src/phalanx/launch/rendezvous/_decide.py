"""Decides what the leader does next: one pure function over records and a clock.

Owns the policy of forming, ending and growing generations. Does not touch a store; ``_participant`` carries
out what is decided here.

Guarantees, for whatever sequence of views it is given:
- generation g+1 is only ever proposed once g is known to have ended, and with min <= size <= max;
- proposed ranks are 0..size-1, one live node each;
- a live node that waits is never forgotten: it is in the next proposal, or the job is at ``max_nodes``, or it was left
  out (``last_choice``) and there are ``min_nodes`` others;
- if at least ``min_nodes`` wait and nobody comes or goes any more, a generation is proposed at the latest
  ``last_call`` (later ``rejoin``) seconds after the last of the needed nodes was seen.

Rejected: waiting the last call again in later generations. Who is alive is known by then (every node has a
lease), so a generation re-forms as soon as all live members are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.launch.rendezvous._rank_order import assign_ranks, choose
from phalanx.protocol import Broken, Members, NodeRecord, timeouts


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How large a generation may be and how long to wait for more nodes (seconds)."""

    min_nodes: int
    max_nodes: int
    last_call: float = timeouts.LAST_CALL
    """From the moment that ``min_nodes`` are there until the first generation forms with fewer than the
    maximum."""
    rejoin: float = timeouts.REJOIN
    """For how long a later generation waits for live members of the last one that have yet to stop their
    workers. Not zero: a generation must not leave out those who only need a moment to hear of it."""
    admit_delay: float = timeouts.ADMIT_DELAY
    """How long newcomers must have been quiet before a running generation is disturbed, so that ten nodes
    that arrive together cost one regroup and not ten."""


class Seen(NamedTuple):
    """A live node and since when the observer has seen this record of it."""

    record: NodeRecord
    since: float


@dataclass(frozen=True, kw_only=True)
class State:
    """What an observer knows. ``ended`` is how the current generation has ended: "", "wanted" or "broken"."""

    nodes: Mapping[str, Seen] = field(default_factory=dict)
    current: Members | None = None
    ended: str = ""
    closed: bool = False
    done: frozenset[int] = frozenset()
    """Ranks of the current generation whose workers have all succeeded: they may leave, and nobody need come."""


@dataclass(frozen=True)
class Idle:
    """Nothing to do until something changes, or until ``until``."""

    until: float | None = None


@dataclass(frozen=True)
class Form:
    """Publish a generation."""

    members: Members


@dataclass(frozen=True)
class End:
    """Declare a generation over: ``kind`` is "broken" (at once) or "wanted" (when it suits the workers)."""

    generation: int
    kind: str
    cause: Broken


Action = Idle | Form | End


def decide(state: State, rules: Rules, now: float) -> Action:
    """Return the next thing for the leader to do."""
    if state.closed:
        return Idle()
    if state.current is None:
        return _form(state, rules, now)
    if state.ended != "broken" and (cause := _damage(state)) is not None:
        return End(state.current.generation, "broken", cause)
    if state.ended:
        return _form(state, rules, now)
    return _grow(state, rules, now)


def waiting(state: State) -> Iterator[Seen]:
    """Live nodes that are in no generation now, or want a later one than the current."""
    if state.current is None:
        yield from state.nodes.values()
        return
    current = state.current.generation
    members = {member.id: member.ticket for member in state.current.nodes}
    for seen in state.nodes.values():
        record = seen.record
        if record.wants > current or members.get(record.id) != record.ticket:
            yield seen


def admissible(state: State, rules: Rules) -> int:
    """Return how many nodes wait that a new generation could take in beside the present members."""
    if state.current is None:
        return 0
    members = {member.id for member in state.current.nodes}
    newcomers = sum(seen.record.id not in members and not seen.record.last_choice for seen in waiting(state))
    return min(newcomers, max(0, rules.max_nodes - len(state.current.nodes)))


def _damage(state: State) -> Broken | None:
    """Members that lost their lease, or left while nobody had ended the generation; not those that were done."""
    assert state.current is not None, "only asked about a generation"
    lost, left = [], []
    for rank, member in enumerate(state.current.nodes):
        seen = state.nodes.get(member.id)
        if seen is None or seen.record.ticket != member.ticket:
            if rank not in state.done:
                lost.append(rank)
        elif seen.record.wants > state.current.generation and not state.ended:
            left.append(rank)
    if not lost and not left:
        return None
    current = state.current
    what = [f"node {current.nodes[rank].id} lost its lease" for rank in lost]
    what += [f"node {current.nodes[rank].id} left" for rank in left]
    return Broken(reason="; ".join(what), workers=tuple(w for rank in lost for w in current.worker_ids(rank)))


def _form(state: State, rules: Rules, now: float) -> Action:
    previous = () if state.current is None else state.current.nodes
    waits = list(waiting(state))
    ready = [seen for seen in waits if not seen.record.last_choice]
    if len(ready) < rules.min_nodes:
        ready = waits
    if len(ready) < rules.min_nodes:
        return Idle()
    chosen = choose([seen.record for seen in ready], previous, rules.max_nodes)
    if len(chosen) < rules.min_nodes:  # several claim the same fixed rank
        return Idle()
    present = {seen.record.id for seen in waits}
    awaited = [member for member in previous if member.id in state.nodes and member.id not in present]
    if state.current is None:
        complete, patience = len(chosen) == rules.max_nodes, rules.last_call
    else:
        complete, patience = not awaited, rules.rejoin
    deadline = sorted(seen.since for seen in ready)[rules.min_nodes - 1] + patience
    if not complete and now < deadline:
        return Idle(until=deadline)
    generation = 0 if state.current is None else state.current.generation + 1
    return Form(Members(generation, assign_ranks(chosen, previous)))


def _grow(state: State, rules: Rules, now: float) -> Action:
    """Ask for a new generation when nodes wait that it could take in."""
    assert state.current is not None, "only a generation can grow"
    count = admissible(state, rules)
    if not count or state.done:  # where one node has finished, the others are about to
        return Idle()
    newcomers = [seen for seen in waiting(state) if not seen.record.last_choice]
    since = [seen.since for seen in newcomers]
    # Bounded by the oldest, so that a steady trickle of newcomers cannot put it off for ever.
    quiet_at = min(max(since) + rules.admit_delay, min(since) + 5 * rules.admit_delay)
    full = len(state.current.nodes) + count >= rules.max_nodes
    if not full and now < quiet_at:
        return Idle(until=quiet_at)
    names = ", ".join(sorted(seen.record.id for seen in newcomers)[:8])
    reason = f"{len(newcomers)} node(s) wait to be admitted: {names}"
    return End(state.current.generation, "wanted", Broken(reason=reason))
