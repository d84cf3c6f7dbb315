"""Defines the records by which the workers of an elastic job agree who computes together, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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

    @property
    def has_state(self) -> bool:
        return self.step != FRESH

    @property
    def position(self) -> tuple[int, int, bool]:
        """Return how far it is; larger is further."""
        return (self.step, self.evaluations, self.evaluating)


@dataclass(frozen=True)
class Round(StoreRecord):
    """The workers of a round in the order of their ranks, or, instead, the generation to move on to."""

    what: ClassVar[str] = "round record"

    workers: tuple[str, ...] = ()
    move_to: int | None = None

    @classmethod
    def from_fields(cls, record: Fields) -> Round:
        move_to = None if record.get("move_to") is None else record.integer("move_to", low=0)
        return cls(record.texts("workers"), move_to)


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
