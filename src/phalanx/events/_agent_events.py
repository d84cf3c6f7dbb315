"""Defines what agents tell of: nodes, generations and processes. Values only; the table of all is ``_event_types``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


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
