"""Defines the event types: one per change of state that an agent or a worker can tell of. Values only.

An agent tells of nodes, generations and processes (``JobEvent``), a worker of what it computes (``TrainingEvent``).
To add one, define it here and put it into ``EVENT_TYPES``: writing and reading follow from its fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar


class EventSource(str, Enum):
    """Who saw it."""

    AGENT = "AGENT"
    WORKER = "WORKER"


EventMetadataValue = str | int | float | bool | None


@dataclass
class Event:
    """A free-form event: what is not one of the types below.

    >>> Event("saved", EventSource.WORKER, 7, {"step": 3}).serialize()
    '{"name": "saved", "source": "WORKER", "timestamp": 7, "metadata": {"step": 3}}'
    """

    name: str
    source: EventSource = EventSource.AGENT
    timestamp: float = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    kind: ClassVar[str] = "event"

    def serialize(self) -> str:
        """Return it as JSON, as torch's tools write it."""
        return json.dumps(asdict(self))

    __str__ = serialize

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Return the event of such a text; an event is returned as it is."""
        if isinstance(data, Event):
            return data
        found = json.loads(data)
        return Event(**{**found, "source": EventSource[found["source"]]})


# -- told by agents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """What all typed events say. ``time`` (seconds since 1970) is filled in when it is written."""

    job: str
    generation: int = -1
    node_rank: int = -1
    host: str = ""
    time: float = 0.0

    kind: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(JobEvent):
    num_nodes: int
    num_workers: int
    seconds: float = 0.0
    kind: ClassVar[str] = "generation_formed"


@dataclass(frozen=True, kw_only=True)
class GenerationEnded(JobEvent):
    how: str
    reason: str
    kind: ClassVar[str] = "generation_ended"


@dataclass(frozen=True, kw_only=True)
class WorkerEvent(JobEvent):
    """What events about one worker's process say."""

    worker_id: str
    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(WorkerEvent):
    kind: ClassVar[str] = "worker_started"


@dataclass(frozen=True, kw_only=True)
class WorkerExited(WorkerEvent):
    exit_code: int
    """As Python counts: minus the number of the signal that ended it."""
    kind: ClassVar[str] = "worker_exited"


@dataclass(frozen=True, kw_only=True)
class WorkerReplaced(JobEvent):
    old_worker_id: str
    worker_id: str
    rank: int
    kind: ClassVar[str] = "worker_replaced"


@dataclass(frozen=True, kw_only=True)
class JobRestarted(JobEvent):
    restart_count: int
    max_restarts: int
    reason: str
    kind: ClassVar[str] = "job_restarted"


@dataclass(frozen=True, kw_only=True)
class WorkerHung(JobEvent):
    worker_id: str
    rank: int
    seconds: float
    kind: ClassVar[str] = "worker_hung"


@dataclass(frozen=True, kw_only=True)
class JobWentBack(JobEvent):
    """All workers were lost, and those that came after them began with an earlier step; ``count`` times so far."""

    from_step: int
    to_step: int
    count: int
    num_new: int = 1
    """How often since this was last told."""
    num_repeated: int = 0
    """How many steps are computed again for it."""
    kind: ClassVar[str] = "job_went_back"


@dataclass(frozen=True, kw_only=True)
class ShutDown(JobEvent):
    reason: str
    succeeded: bool
    kind: ClassVar[str] = "shut_down"


# -- told by workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingEvent:
    """What all events of a worker say. ``time`` and ``worker`` are filled in when it is written; a field that is None
    by default is left out unless it is given."""

    time: float = 0.0
    worker: str = ""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(TrainingEvent):
    pid: int
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
    kind: ClassVar[str] = "regrouped"


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
class GroupLost(TrainingEvent):
    generation: int
    step: int
    reason: str
    kind: ClassVar[str] = "lost"


@dataclass(frozen=True, kw_only=True)
class StateSent(TrainingEvent):
    to: str
    bytes: int
    kind: ClassVar[str] = "sent"


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
class Resumed(TrainingEvent):
    step: int
    kind: ClassVar[str] = "resumed"


@dataclass(frozen=True, kw_only=True)
class Saved(TrainingEvent):
    step: int
    path: str
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
    kind.kind: kind
    for kind in (
        Event,
        GenerationFormed,
        GenerationEnded,
        WorkerStarted,
        WorkerExited,
        WorkerReplaced,
        JobRestarted,
        WorkerHung,
        JobWentBack,
        ShutDown,
        TrainingStarted,
        RoundFormed,
        StepCommitted,
        GroupLost,
        StateSent,
        StateReceived,
        RankTakenOver,
        StepsRepeated,
        NonFiniteFound,
        Resumed,
        Saved,
        SaveFailed,
        SaveUnreadable,
        TrainingLeft,
        NotNeeded,
        TrainingFinished,
        EventsLost,
    )
}
