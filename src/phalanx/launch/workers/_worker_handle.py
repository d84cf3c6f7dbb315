"""Holds what the agent knows of one worker: its process, its place, its files, and how its end was dealt with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.launch.telemetry._pump import Sinks
from phalanx.launch.workers._processes import WorkerProcess
from phalanx.launch.workers._worker_environment import RankAssignment
from phalanx.protocol import RecordError, WorkPosition


@dataclass(kw_only=True)
class WorkerHandle:
    """Stands for one started worker. ``assignment`` is the newest; a surviving worker keeps its process and files."""

    assignment: RankAssignment
    process: WorkerProcess
    stderr_path: str = ""
    stderr_sinks: Sinks | None = None
    error_file: str = ""
    stacks_file: str = ""
    position_file: str = ""
    result_fd: int = -1
    started_at: float = 0.0
    born: int = 0
    """The generation that it was started for."""
    is_told: bool = False
    """Whether its end has been passed on."""
    is_judged: bool = False
    """Whether the agent has dealt with its end."""
    is_asked_to_leave: bool = False
    has_done_its_part: bool = False
    """Whether its script had ended well before the process was ended otherwise."""
    is_killed: bool = False
    """Whether it was killed here because it did not stop."""
    note: str = ""
    value: Any = None
    """What a function worker returned, once ``fetch_value`` has read it."""
    problem: str = ""
    """Why it has failed although it ended with 0."""

    @property
    def id(self) -> str:
        return self.assignment.worker_id

    @property
    def is_running(self) -> bool:
        return self.process.exit_code is None

    @property
    def has_succeeded(self) -> bool:
        is_well = self.process.exit_code == 0 or (self.has_done_its_part and not self.is_running)
        return is_well and not self.problem

    def place(self) -> str:
        """Return what it computes, or computed when it died; empty if it has left no note."""
        try:
            with open(self.position_file, "rb") as file:
                return WorkPosition.from_json(file.readline(4096)).describe()
        except (OSError, RecordError):
            return ""

    @property
    def wants_successor(self) -> bool:
        """Whether it ended although it should not have."""
        return not (self.is_running or self.has_succeeded or self.is_asked_to_leave)
