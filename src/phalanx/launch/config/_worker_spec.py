"""Describes workers as users of the elastic API do: what to run, how many, what became of them.

Owns ``WorkerSpec``, ``AgentOptions``, ``Script``, ``Worker``, ``WorkerGroup``, ``WorkerState`` and ``RunResult``;
starts nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.rendezvous._interface import RendezvousHandler
from phalanx.protocol import timeouts

if TYPE_CHECKING:
    from phalanx.launch.numa import NumaOptions


@dataclass(frozen=True)
class Script:
    """Names a Python file, or a module's dotted name, to be run as ``__main__`` with its own arguments.

    >>> Script("train.py").name, Script("my.train", is_module=True).name
    ('train.py', 'my.train')
    """

    target: str
    is_module: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else os.path.basename(self.target)


Entrypoint = Callable[..., Any] | str | Script


class WorkerState(str, Enum):
    """Says what a group of workers is doing."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether its processes exist, healthy or not."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass
class WorkerSpec:
    """Says what one node runs, and through which rendezvous it finds the others."""

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    """``entrypoint`` under its oldest name."""
    entrypoint: Entrypoint | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    min_nodes: int = 1

    def __post_init__(self) -> None:
        if self.fn is not None:
            warnings.warn("WorkerSpec(fn=...) is deprecated: say entrypoint=", DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise ValueError("there is nothing to run: the entrypoint is None; expected a function or a command")
        if self.local_world_size < 1:
            raise ValueError(f"local_world_size is {self.local_world_size}; expected at least 1 worker per node")
        if self.monitor_interval <= 0:
            raise ValueError(f"monitor_interval is {self.monitor_interval}; expected a positive number of seconds")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; expected 0 or more")

    def get_entrypoint_name(self) -> str:
        """Return a short name for reports."""
        if isinstance(self.entrypoint, Script):
            return self.entrypoint.name
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        return str(getattr(self.entrypoint, "__qualname__", repr(self.entrypoint)))


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Says how an agent treats its workers, where ``LocalElasticAgent`` is made by hand."""

    on_failure: str = "restart"
    shutdown_timeout: float = timeouts.SHUTDOWN
    exit_barrier_timeout: float = timeouts.EXIT_BARRIER
    hang_timeout: float = 0.0
    """0: no detection."""
    start_timeout: float = timeouts.WORKER_START
    """``hang_timeout`` until a worker has made its first step."""
    uninterruptible_state_timeout: float | None = None
    """Seconds that the kernel may hold a worker (state D) before the job ends; None: as the environment says."""

    def __post_init__(self) -> None:
        if self.on_failure not in ("restart", "heal"):
            raise ValueError(f"on_failure is {self.on_failure!r}; expected restart or heal")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}; expected 0 or more seconds")


@dataclass
class Worker:
    """Describes one worker as others may see it. ``id`` is what its agent knows it by: its pid."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = None


@dataclass
class WorkerGroup:
    """Describes the workers of a node; a snapshot that ``LocalElasticAgent.get_worker_group`` gives out."""

    spec: WorkerSpec
    workers: list[Worker] = field(default_factory=list)
    state: WorkerState = WorkerState.INIT
    group_rank: int | None = None
    group_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    store: Any = None
    """A c10d store of the generation, for agents of your own."""

    def __post_init__(self) -> None:
        self.workers = self.workers or [Worker(rank) for rank in range(self.spec.local_world_size)]


@dataclass
class RunResult:
    """Says how a run ended on this node: values or failures, by global rank."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    num_setbacks: int = 0
    """How often all workers were lost and the job went back to an earlier step."""

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED
