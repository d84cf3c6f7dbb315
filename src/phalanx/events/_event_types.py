"""Defines the event types: one per change of state that an agent or a worker can tell of. Values only.

An agent tells of nodes, generations and processes (``JobEvent``), a worker of what it computes (``TrainingEvent``).
To add one, define it here and put it into ``EVENT_TYPES``: writing and reading follow from its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from phalanx.events._free_event import Event

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
    num_wanted: int = 0  # workers that the job would have with all nodes that it may have; 0: not told
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
class WorkerFailed(WorkerEvent):
    """A worker ended by itself though it should not have, or was killed; told once for each process."""

    exit_code: int
    cause: str
    """One of few words, to count by: a signal's name, ``exit 1``, an exception's class, ``hang``, ``lost contact``."""
    message: str = ""
    stderr: tuple[str, ...] = ()
    """Its last lines."""
    kind: ClassVar[str] = "worker_failed"


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
    stacks: str = ""  # what it was doing, as far as it said
    kind: ClassVar[str] = "worker_hung"


@dataclass(frozen=True, kw_only=True)
class NodeLoad(JobEvent):
    """What a machine is busy with, every few seconds while somebody can look at it."""

    node: str
    cpu: float
    """Share of all its processors, from 0 to 1."""
    memory_used: int
    memory_total: int
    received: float = 0.0
    """Bytes in a second, over all interfaces but loopback."""
    sent: float = 0.0
    kind: ClassVar[str] = "node_load"


@dataclass(frozen=True, kw_only=True)
class ActionAsked(JobEvent):
    """Somebody with the job's secret asked for something: ``scale``, ``drain``, ``save`` or ``stop``."""

    action: str
    detail: str = ""
    by: str = ""
    kind: ClassVar[str] = "action"


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
class LimitReached(JobEvent):
    """The job, or a part of it, does not go on as before; ``limit`` says what was reached."""

    limit: str
    """``restarts``, ``progress``, ``do not retry`` or ``node``."""
    reason: str
    nodes: tuple[str, ...] = ()
    """Those that are left out."""
    kind: ClassVar[str] = "limit_reached"


@dataclass(frozen=True, kw_only=True)
class NodeNoticed(JobEvent):
    """A node was told that it will be taken away; its workers leave at their next step boundary."""

    source: str
    reason: str
    seconds: float | None = None
    """Until then, if that is known."""
    kind: ClassVar[str] = "node_noticed"


@dataclass(frozen=True, kw_only=True)
class GoodputTold(JobEvent):
    """Where the time of a job's workers went, told at its end (``phalanx.watch.goodput``)."""

    goodput: float
    """Productive worker-seconds of all, from 0 to 1."""
    worker_seconds: float
    parts: dict[str, Any]
    """Worker-seconds by what they were spent on."""
    failures: int
    seconds: float
    text: str
    mttr_seconds: float | None = None
    mtbf_seconds: float | None = None
    kind: ClassVar[str] = "goodput"


@dataclass(frozen=True, kw_only=True)
class AgentEventsLost(JobEvent):
    """So many lines of an agent could not be kept until the disk took them."""

    lines: int
    kind: ClassVar[str] = "agent_lost_events"


@dataclass(frozen=True, kw_only=True)
class ShutDown(JobEvent):
    reason: str
    succeeded: bool
    kind: ClassVar[str] = "shut_down"


# -- told by workers ----------------------------------------------------------------------------------------------


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
