"""Defines the event types: one per change of state that an agent or a worker can tell of. Values only.

An agent tells of nodes, generations and processes (``_agent_events``), a worker of what it computes
(``TrainingEvent``). To add one, define it and put it into ``EVENT_TYPES``: writing and reading follow from its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from phalanx.events._agent_events import (
    ActionAsked,
    AgentEventsLost,
    GenerationEnded,
    GenerationFormed,
    GoodputTold,
    JobEvent,
    JobRestarted,
    JobWentBack,
    LimitReached,
    NodeLoad,
    NodeNoticed,
    ShutDown,
    WorkerExited,
    WorkerFailed,
    WorkerHung,
    WorkerReplaced,
    WorkerStarted,
)
from phalanx.events._free_event import Event


@dataclass(frozen=True, kw_only=True)
class TrainingEvent:
    """What all events of a worker say. A field that is None by default is left out unless it is given."""

    time: float = 0.0
    worker: str = ""  # as ``time``, filled in when it is written
    kind: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(TrainingEvent):
    pid: int
    total_steps: int | None = None
    """How many steps the loop will have in all."""
    num_slots: int | None = None
    kind: ClassVar[str] = "started"


@dataclass(frozen=True, kw_only=True)
class RoundFormed(TrainingEvent):
    """The worker has its place among others, and the state that all of them have."""

    generation: int
    round: int
    workers: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]
    step: int
    seconds: float
    rank: int | None = None
    machine: dict[str, Any] | None = None
    state_seconds: float | None = None
    """How much of ``seconds`` it took to bring all to one state."""
    first_slot: int | None = None
    num_slots: int | None = None
    """How many slots this worker carries, from ``first_slot`` on; without it they are not neighbours."""
    is_verified: bool | None = None
    """Whether the digests of all workers were compared, and were equal."""
    kind: ClassVar[str] = "regrouped"


@dataclass(frozen=True, kw_only=True)
class SlotsDealt(TrainingEvent):
    """From ``step`` on workers carry ``sizes`` slots of ``pace`` seconds each; steps get ``gain`` times shorter."""

    step: int
    generation: int
    workers: tuple[str, ...]
    sizes: tuple[int, ...]
    pace: tuple[float, ...]
    gain: float
    kind: ClassVar[str] = "slots_dealt"


@dataclass(frozen=True, kw_only=True)
class StepCommitted(TrainingEvent):
    step: int
    epoch: int
    loss: float | None = field(metadata={"finite": False})
    samples: int
    generation: int
    round: int
    world_size: int | None = None
    kind: ClassVar[str] = "step"


@dataclass(frozen=True, kw_only=True)
class WorkerStepTimes(TrainingEvent):
    """What a worker spent on steps that it committed one after the other, from ``step`` on, in microseconds each.

    ``wait`` is from the moment that its own part was done to the reduced gradient: for others, and for the exchange.
    """

    step: int
    compute: tuple[int, ...]
    wait: tuple[int, ...]
    data: tuple[int, ...]
    save: tuple[int, ...] = ()
    collective_bytes: dict[str, Any] | None = None
    """By the name of a collective: the bytes that it moved on this worker since this was last told."""
    kind: ClassVar[str] = "times"


@dataclass(frozen=True, kw_only=True)
class GroupLost(TrainingEvent):
    generation: int
    step: int
    reason: str
    dropped: float | None = None
    """Seconds of work on a step that has to be done again."""
    waited: float | None = None
    """Seconds for which it then waited for others, before the loss was known."""
    kind: ClassVar[str] = "lost"


@dataclass(frozen=True, kw_only=True)
class StateSent(TrainingEvent):
    to: str
    bytes: int
    kind: ClassVar[str] = "sent"


@dataclass(frozen=True, kw_only=True)
class CellsMoved(TrainingEvent):
    """Cells of a sharded job that this worker sent or received between two steps, and how many are still to move."""

    step: int
    cells: int
    bytes: int
    left: int
    kind: ClassVar[str] = "cells_moved"


@dataclass(frozen=True, kw_only=True)
class CellsHeld(TrainingEvent):
    """What this worker holds of a sharded job after a regroup: cells, those it owns, those without another holder."""

    step: int
    cells: int
    owned: int
    unprotected: int
    mirrors: tuple[str, ...]
    """Workers that hold some of them too."""
    copies: int | None = None
    """How many there shall be of each."""
    bytes: int | None = None
    unprotected_bytes: int | None = None
    kind: ClassVar[str] = "cells_held"


@dataclass(frozen=True, kw_only=True)
class StateReceived(TrainingEvent):
    step: int
    source: str
    kind: ClassVar[str] = "received"


@dataclass(frozen=True, kw_only=True)
class RankTakenOver(TrainingEvent):
    """The worker does what one that was lost after the last step had still to do."""

    step: int
    rank: int
    generation: int
    kind: ClassVar[str] = "took_over"


@dataclass(frozen=True, kw_only=True)
class StepsRepeated(TrainingEvent):
    """All workers were lost, and this one begins with an earlier step than the job had come to."""

    step: int
    before: int
    kind: ClassVar[str] = "went_back"


@dataclass(frozen=True, kw_only=True)
class NonFiniteFound(TrainingEvent):
    """A step or a state has values that are not finite; ``reaction`` says what is done about it."""

    step: int
    reaction: str
    epoch: int | None = None
    loss: str | None = None
    grads: tuple[str, ...] | None = None
    buffers: tuple[str, ...] | None = None
    state: tuple[str, ...] | None = None
    slots: dict[str, Any] | None = None
    """The samples of each slot that is to blame."""
    kind: ClassVar[str] = "nonfinite"


@dataclass(frozen=True, kw_only=True)
class WrongBitsFound(TrainingEvent):
    """Workers differ, and the step is repeated without ``culprit`` ("": not known); ``values``: its own, another's."""

    step: int
    what: str
    culprit: str
    slot: int | None = None
    parameter: str = ""
    element: int = -1
    values: tuple[str, ...] = ()
    kind: ClassVar[str] = "wrong_bits"


@dataclass(frozen=True, kw_only=True)
class WeightsCompared(TrainingEvent):
    """The weights after ``step`` steps had one sha256 on all ``workers`` (``Job.fingerprint``)."""

    step: int
    digest: str
    workers: int
    kind: ClassVar[str] = "fingerprint"


@dataclass(frozen=True, kw_only=True)
class StepSkipped(TrainingEvent):
    """A step was committed without its update; ``in_row`` with this one."""

    step: int
    epoch: int
    reason: str
    in_row: int
    kind: ClassVar[str] = "skipped"


@dataclass(frozen=True, kw_only=True)
class RolledBack(TrainingEvent):
    """The weights became those of the save of step ``to``; the samples of steps ``to`` to ``step`` are left out."""

    step: int
    to: int
    reason: str
    kind: ClassVar[str] = "rolled_back"


@dataclass(frozen=True, kw_only=True)
class Resumed(TrainingEvent):
    step: int
    kind: ClassVar[str] = "resumed"


@dataclass(frozen=True, kw_only=True)
class Saved(TrainingEvent):
    step: int
    path: str
    verified: bool | None = None  # it was read back from the disk and is what was to be written
    kind: ClassVar[str] = "saved"


@dataclass(frozen=True, kw_only=True)
class SaveFailed(TrainingEvent):
    step: int
    error: str
    next_attempt_in: float
    kind: ClassVar[str] = "save_failed"


@dataclass(frozen=True, kw_only=True)
class SaveUnreadable(TrainingEvent):
    problem: str
    kind: ClassVar[str] = "bad_save"


@dataclass(frozen=True, kw_only=True)
class DirectoryShared(TrainingEvent):
    """Another job writes to a directory of this one at the same time."""

    directory: str
    owner: str
    """The other one."""
    kind: ClassVar[str] = "directory_shared"


@dataclass(frozen=True, kw_only=True)
class TrainingLeft(TrainingEvent):
    """The worker was told to leave, and did so at a step boundary."""

    step: int
    generation: int | None = None
    kind: ClassVar[str] = "left"


@dataclass(frozen=True, kw_only=True)
class NotNeeded(TrainingEvent):
    """The worker came after the last step and found nothing left to do."""

    step: int
    kind: ClassVar[str] = "surplus"


@dataclass(frozen=True, kw_only=True)
class TrainingFinished(TrainingEvent):
    step: int
    kind: ClassVar[str] = "finished"


@dataclass(frozen=True, kw_only=True)
class EventsLost(TrainingEvent):
    """So many lines could not be kept until the disk took them."""

    lines: int
    kind: ClassVar[str] = "lost_events"


AnyEvent = JobEvent | Event | TrainingEvent

EVENT_TYPES: dict[str, type[AnyEvent]] = {
    kind.kind: kind for kind in (
        Event, GenerationFormed, GenerationEnded, WorkerStarted, WorkerExited, WorkerFailed, WorkerReplaced,
        JobRestarted, WorkerHung, NodeLoad, ActionAsked, JobWentBack, LimitReached, NodeNoticed, GoodputTold,
        AgentEventsLost, ShutDown, TrainingStarted, RoundFormed, SlotsDealt, StepCommitted, WorkerStepTimes,
        GroupLost, StateSent, CellsMoved, CellsHeld, StateReceived, RankTakenOver, StepsRepeated, NonFiniteFound,
        WrongBitsFound, WeightsCompared, StepSkipped, RolledBack, Resumed, Saved, SaveFailed, SaveUnreadable,
        DirectoryShared, TrainingLeft, NotNeeded, TrainingFinished, EventsLost,
    )
}  # fmt: skip
