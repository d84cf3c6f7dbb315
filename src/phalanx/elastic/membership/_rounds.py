"""Decides who takes part in a round, by what workers have declared in the store. Pure.

Agents agree on the *members* of a generation. Which of them are ready to compute is the workers' own business: within
a generation they form *rounds*, so that survivors never wait for a replacement that still imports and builds its
model; it gets a place in the next round, at a step boundary.

Rules: (1) a round's list is written once, by whoever is first to find that ``choose_round`` has a choice: mostly the
one that ``convenes``, so that not everybody reads what everybody has declared; (2) workers with live state
wait for all of them that they knew, never for newcomers; (3) when nobody has state, all members are waited
for; (4) while they are inside an evaluation, which newcomers cannot join, only they get a place, and who is one step
behind: its loop comes to that evaluation after it has taken the step over; (5) what agents say about the end of a
generation ends a round only if it names a worker of it as lost: a round of those who live goes on to a step boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.comm import Group
from phalanx.protocol import Broken, Ready, Round, timeouts


@dataclass(frozen=True)
class Membership:
    """This worker's place in one round of one generation; ``group`` is None when it is alone."""

    generation: int
    round: int
    workers: tuple[str, ...]
    rank: int
    group: Group | None


def choose_round(members: Sequence[str], ready: Mapping[str, Ready]) -> Round | None:
    """Return the first round of a generation; None while someone has to be waited for.

    >>> ready = {"a": Ready(step=7, peers=("a", "b", "c")), "c": Ready(step=7, peers=("a", "b", "c"))}
    >>> choose_round(("a", "c", "d"), ready)        # b is no member any more, d still starts
    Round(workers=('a', 'c'), move_to=None)
    """
    here = [worker for worker in members if worker in ready]
    with_state = [worker for worker in here if ready[worker].has_state]
    if not with_state:
        return Round(tuple(members)) if len(here) == len(members) else None
    if awaited_peers(members, ready):
        return None
    best = max(ready[worker].position for worker in with_state)
    if best[2]:
        follow = {worker for worker in with_state if ready[worker].step == best[0] - 1}
        return Round(tuple(w for w in here if w in follow or ready[w].position == best))
    return Round(tuple(here))


def convenes(worker: str, members: Sequence[str], mine: Ready, waited: float) -> bool:
    """Return whether a worker that has waited so long reads what all have declared, to write the first round.

    The first member that was in its last round does, without a state the first of all; should that one not get to it,
    one more after ``timeouts.CONVENE_AFTER`` seconds, the next after twice as long, and so on: they stay few.

    >>> mine = Ready(step=7, peers=("a", "b", "c"))
    >>> [convenes(worker, ("new", "a", "b", "c"), mine, 0.0) for worker in ("new", "a", "b")]
    [False, True, False]
    >>> convenes("b", ("new", "a", "b", "c"), mine, 0.3), convenes("new", ("new", "a"), Ready(), 0.0)
    (True, True)
    """
    known = set(mine.peers) if mine.has_state else set(members)
    candidates = [member for member in members if member in known]
    return worker in candidates[: 1 + int(math.log2(1 + waited / timeouts.CONVENE_AFTER))]


def awaited_peers(members: Sequence[str], ready: Mapping[str, Ready]) -> tuple[str, ...]:
    """Members with a state whom the first round of a generation has to wait for, since they have not declared yet.

    >>> awaited_peers(("a", "c", "d"), {"a": Ready(step=7, peers=("a", "b", "c"))})
    ('c',)
    """
    lists = {id(one.peers): one.peers for one in ready.values() if one.has_state}  # mostly one list, shared by all
    known = {peer for peers in lists.values() for peer in peers}
    return tuple(worker for worker in members if worker in known and worker not in ready)


def is_over(end: Broken, workers: Sequence[str]) -> bool:
    """Return whether what agents say about the end of a generation ends a round of these workers at once.

    >>> end = Broken(reason="b died", workers=("b",))
    >>> is_over(end, ("a", "b", "c")), is_over(end, ("a", "c"))
    (True, False)
    """
    return end.at_once or any(worker in workers for worker in end.workers)


def choose_writer(workers: Sequence[str], came: Sequence[Sequence[int]]) -> str:
    """Return which worker writes: the one that is there for the longest, the lowest rank among equals.

    ``came`` says of each in which generation and round it came, and as which rank. These never change, and whoever
    comes later has larger ones, so the writer stays the same as long as it lives.

    >>> choose_writer(("new", "old"), ([3, 0, 0], [0, 0, 1]))
    'old'
    """
    return min(zip(came, workers, strict=True))[1]


def choose_source(steps: Sequence[int]) -> int:
    """Return the rank whose state counts: that of the most advanced worker, the lowest rank among equals.

    >>> choose_source([-1, 7, 8, 8])
    2
    """
    return list(steps).index(max(steps))
