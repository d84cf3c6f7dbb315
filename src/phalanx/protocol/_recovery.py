"""Defines the records by which agents agree on the end of a generation, and tell each other what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from phalanx._fields import Fields, read_dataclass
from phalanx.protocol._codec import RecordError, StoreRecord, at_least


class Action(str, Enum):
    """How a generation ends."""

    RESTART = "restart"
    """All workers stop and start anew; counted."""
    HEAL = "heal"
    """Survivors stay, the dead are replaced; counted."""
    SHRINK = "shrink"
    """Survivors stay, the dead are not replaced."""
    REGROUP = "regroup"
    """The membership changes for another reason than a failure; not counted."""
    FAIL = "fail"
    """The job is over."""


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Deaths in a row with nothing gained in between; ``phalanx.launch.recovery._streak`` counts them."""

    errors: int = 0
    kills: int = 0
    generation: int = -1
    """Of the last death that counted."""
    begin: int = -1
    """The furthest step when it began."""
    step: int = -1
    """The furthest step now."""
    place: str = ""
    """Where the last one died: step, slot and samples, if it has left a note."""
    workers: tuple[str, ...] = ()
    """Those that died in that place, one after the other."""
    hosts: tuple[str, ...] = ()
    """Where they ran."""


@dataclass(frozen=True, kw_only=True)
class ContactLosses:
    """How often contact was lost in a row, without a step committed in between."""

    count: int = at_least(0, default=0)
    step: int = -1
    """The most steps that anybody had committed when it was last lost."""
    alone: str = ""
    """The one worker that said so each time, and nobody else, without a name; empty: there is none."""


@dataclass(frozen=True, kw_only=True)
class Recovery(StoreRecord):
    """The one decision about the end of a generation that all agents apply."""

    what: ClassVar[str] = "recovery record"

    action: Action
    restarts: int = at_least(0)
    """Restarts used up once this is carried out."""
    reason: str
    starts_anew: bool = False
    """Whether all workers stop and start anew; else those that run stay."""
    streak: Streak = field(default_factory=Streak)
    ports_taken: int = at_least(0, default=0)
    """Generations in a row that ended because the port for the workers' store was taken."""
    replace: tuple[str, ...] = ()
    """Workers that run and must not: their agents kill them."""
    lost_contact: ContactLosses | None = None
    """When workers had lost contact: how often in a row."""
    failures: tuple[str, ...] = ()
    """When, and on which node, the failures were that used up restarts; see ``phalanx.launch.recovery._budget``."""
    leave_out: tuple[str, ...] = ()
    """Nodes that take part no more, unless the others are too few."""
    limit: str = ""
    """Which limit was reached, if that is why: ``restarts``, ``progress``, ``node`` or ``do not retry``."""

    @classmethod
    def from_fields(cls, record: Fields) -> Recovery:
        try:
            action = Action(record.text("action"))
        except ValueError as error:
            raise RecordError(f"{cls.what}: {error}") from error
        streak, losses = record.get("streak"), record.get("lost_contact")
        return cls(
            action=action,
            restarts=record.integer("restarts", low=0),
            reason=record.text("reason"),
            starts_anew=record.flag("starts_anew"),
            streak=read_dataclass(Streak, Fields(streak, f"{cls.what}'s streak", RecordError)),
            ports_taken=record.integer("ports_taken", low=0),
            replace=record.texts("replace"),
            lost_contact=None
            if losses is None
            else read_dataclass(ContactLosses, Fields(losses, f"{cls.what}'s lost_contact", RecordError)),
            failures=record.texts("failures", default=[]),
            leave_out=record.texts("leave_out", default=[]),
            limit=record.text("limit", default=""),
        )


@dataclass(frozen=True, kw_only=True)
class FailureReport(StoreRecord):
    """What a worker died of, as its agent tells the others; see ``phalanx.launch.ProcessFailure``."""

    what: ClassVar[str] = "failure record"

    local_rank: int
    pid: int
    exitcode: int
    error_file: str = ""
    message: str = ""
    traceback: str = ""
    timestamp: float = 0.0
    host: str
    rank: int
    worker_id: str = ""
    generation: int = at_least(0, default=0)
    stderr_tail: tuple[str, ...] = ()
    is_incurable: bool = False
    ends_job: bool = False
    has_wrong_bits: bool = False
    note: str = ""
