"""Who takes part in a round: pure decisions over what workers have declared in the store.

Agents agree on the *members* of a generation. Which of them are ready to compute is the workers' own business: within
a generation they form *rounds*, so that survivors never wait for a replacement that still imports and builds its
model; it gets a seat in the next round, at a step boundary.

Rules: (1) a round's list is written once, by the worker that ``choose_round`` names; (2) workers with live state
("veterans") wait for all veterans they knew, never for newcomers; (3) when nobody has state, all members are waited
for; (4) while veterans are inside an evaluation, which newcomers cannot join, only they get a seat, and who is one step
behind: its loop comes to that evaluation after it has taken the step over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx._fields import Fields, load_json, short
from phalanx.comm import Group
from phalanx.protocol import RecordError

FRESH = -1
"""The step of a worker that has no state yet."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a worker declares when it waits for a seat."""

    step: int = FRESH
    evaluations: int = 0
    evaluating: bool = False
    peers: tuple[str, ...] = ()
    """The workers of its last round, itself included."""

    @property
    def is_veteran(self) -> bool:
        return self.step != FRESH

    @property
    def position(self) -> tuple[int, int, bool]:
        """How far it is; larger is further."""
        return (self.step, self.evaluations, self.evaluating)

    def to_json(self) -> bytes:
        return json.dumps([self.step, self.evaluations, self.evaluating, self.peers]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Ready:
        """``RecordError`` when it is none."""
        names = ("step", "evaluations", "evaluating", "peers")
        row = load_json(data, "ready record", RecordError)
        if not isinstance(row, list) or len(row) != len(names):
            raise RecordError(f"ready record is {short(row)}; expected {len(names)} fields")
        record = Fields(dict(zip(names, row, strict=True)), "ready record", RecordError)
        return cls(
            step=record.integer("step", low=FRESH),
            evaluations=record.integer("evaluations", low=0),
            evaluating=record.flag("evaluating"),
            peers=record.texts("peers"),
        )


@dataclass(frozen=True)
class Seat:
    """This worker's place in one round of one generation; ``group`` is None when it is alone."""

    generation: int
    round: int
    workers: tuple[str, ...]
    rank: int
    group: Group | None


@dataclass(frozen=True)
class Round:
    """The workers of a round in the order of their ranks, or, instead, the generation to move on to."""

    workers: tuple[str, ...] = ()
    move_to: int | None = None

    def to_json(self) -> bytes:
        return json.dumps({"workers": self.workers, "move_to": self.move_to}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Round:
        """``RecordError`` when it is none."""
        record = Fields(load_json(data, "round record", RecordError), "round record", RecordError)
        move_to = None if record.get("move_to") is None else record.integer("move_to", low=0)
        return cls(record.texts("workers"), move_to)


def choose_round(members: Sequence[str], ready: Mapping[str, Ready]) -> tuple[str, Round] | None:
    """Who writes the first round of a generation, and what; None while someone has to be waited for.

    >>> ready = {"a": Ready(step=7, peers=("a", "b", "c")), "c": Ready(step=7, peers=("a", "b", "c"))}
    >>> choose_round(("a", "c", "d"), ready)        # b is no member any more, d still starts
    ('a', Round(workers=('a', 'c'), move_to=None))
    """
    here = [worker for worker in members if worker in ready]
    veterans = [worker for worker in here if ready[worker].is_veteran]
    if not veterans:
        return (members[0], Round(tuple(members))) if len(here) == len(members) else None
    if awaited_veterans(members, ready):
        return None
    best = max(ready[worker].position for worker in veterans)
    writer = next(worker for worker in veterans if ready[worker].position == best)
    if best[2]:
        follow = {worker for worker in veterans if ready[worker].step == best[0] - 1}
        return writer, Round(tuple(w for w in here if w in follow or ready[w].position == best))
    return writer, Round(tuple(here))


def awaited_veterans(members: Sequence[str], ready: Mapping[str, Ready]) -> tuple[str, ...]:
    """Members with a state whom the first round of a generation has to wait for, since they have not declared yet.

    >>> awaited_veterans(("a", "c", "d"), {"a": Ready(step=7, peers=("a", "b", "c"))})
    ('c',)
    """
    known = {peer for one in ready.values() if one.is_veteran for peer in one.peers}
    return tuple(worker for worker in members if worker in known and worker not in ready)


def choose_source(steps: Sequence[int]) -> int:
    """The rank whose state counts: that of the most advanced worker, the lowest rank among equals.

    >>> choose_source([FRESH, 7, 8, 8])
    2
    """
    return list(steps).index(max(steps))
