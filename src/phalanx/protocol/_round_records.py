"""Defines the records by which the workers of an elastic job agree who computes together, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from phalanx._fields import Fields, short
from phalanx.protocol._codec import RecordError, StoreRecord, at_least

FRESH = -1
"""The step of a worker that has no state yet."""


@dataclass(frozen=True, kw_only=True)
class Ready(StoreRecord):
    """What a worker declares when it waits for its place in a round."""

    what: ClassVar[str] = "ready record"

    step: int = at_least(FRESH, default=FRESH)
    evaluations: int = at_least(0, default=0)
    evaluating: bool = False
    peers: tuple[str, ...] = ()
    """The workers of its last round, itself included."""
    unknown: tuple[str, ...] = ()
    """In the store, in the place of ``peers``: the members of the generation that were not in its last round. They are
    few, where each worker listing all others would fill the store with the square of their number."""
    process: dict[str, Any] = field(default_factory=dict, compare=False)
    """Who it is, as ``phalanx.comm`` writes it, for the round's record; empty: it has not said."""

    @property
    def has_state(self) -> bool:
        return self.step != FRESH

    def to_declare(self, members: Sequence[str]) -> Ready:
        """Return it as it is written for a generation of these members.

        >>> Ready(step=7, peers=("a", "b", "lost")).to_declare(("a", "b", "new"))
        Ready(step=7, evaluations=0, evaluating=False, peers=(), unknown=('new',), process={})
        """
        known = set(self.peers)
        unknown = tuple(member for member in members if member not in known) if self.has_state else ()
        return replace(self, peers=(), unknown=unknown)

    @property
    def position(self) -> tuple[int, int, bool]:
        """Return how far it is; larger is further."""
        return (self.step, self.evaluations, self.evaluating)


def declared_by(members: Sequence[str], records: Sequence[bytes | None]) -> dict[str, Ready]:
    """Return what those members have declared whose records are there, with the peers that they have among the members.

    >>> records = [Ready(step=7, peers=("a", "lost")).to_declare(("a", "new")).to_json(), None]
    >>> declared_by(("a", "new"), records)["a"].peers
    ('a',)
    """
    found = {m: Ready.from_json(data) for m, data in zip(members, records, strict=True) if data is not None}
    peers: dict[tuple[str, ...], tuple[str, ...]] = {}
    for member, one in found.items():
        if one.has_state and not one.peers:
            if one.unknown not in peers:
                unknown = set(one.unknown)
                peers[one.unknown] = tuple(other for other in members if other not in unknown)
            found[member] = replace(one, peers=peers[one.unknown])
    return found


@dataclass(frozen=True)
class Round(StoreRecord):
    """The workers of a round in the order of their ranks, or, instead, the generation to move on to."""

    what: ClassVar[str] = "round record"

    workers: tuple[str, ...] = ()
    move_to: int | None = None
    processes: str = field(default="", compare=False, repr=False)
    """Who the workers are, packed by ``phalanx.comm``: the same for all, so that nobody has to ask; empty: unknown."""

    @classmethod
    def from_fields(cls, record: Fields) -> Round:
        move_to = None if record.get("move_to") is None else record.integer("move_to", low=0)
        return cls(record.texts("workers"), move_to, record.text("processes", default=""))


@dataclass(frozen=True, kw_only=True)
class Finish(StoreRecord):
    """The last round of a job; ``workers`` and their ``hosts`` are in the order of their ranks."""

    what: ClassVar[str] = "finish record"

    generation: int = at_least(0)
    round: int = at_least(0)
    step: int = at_least(0)
    workers: tuple[str, ...]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation(StoreRecord):
    """The result of an evaluation, means by name. A mean may be infinite or nan."""

    what: ClassVar[str] = "evaluation record"

    means: dict[str, float]

    @classmethod
    def from_fields(cls, record: Fields) -> Evaluation:
        means = record.mapping("means")
        if not all(type(value) in (int, float) for value in means.values()):
            raise RecordError(f"evaluation record holds {short(means)}; expected numbers by name")
        return cls(means)
