"""Hears notices that come from this machine: a file that appears, a function of the user's, a signal.

Slurm sends a signal of the user's choosing some time before the end (``--signal=USR1@120``), Kubernetes SIGTERM and
then SIGKILL ``terminationGracePeriodSeconds`` later. A signal is not asked for: the agent installs its handler.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.preemption._notice import Notice, SourceProblem

MAX_REASON = 200
KUBERNETES_GRACE = 30.0
"""What Kubernetes grants unless the pod says otherwise."""

NoticeFunction = Callable[[], Notice | str | bool | None]
"""A reason, a notice, or whether there is one."""


@dataclass(frozen=True, kw_only=True)
class FileNotices:
    """A notice is there when the file is; what it holds is the reason."""

    path: str
    interval: float = 0.25
    name: str = "file"

    def look(self, now: float) -> Notice | None:
        try:
            with Path(self.path).open("rb") as file:
                text = file.read(MAX_REASON).decode("utf-8", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceProblem(f"{self.path} cannot be read: {error}") from error
        return Notice(source=self.name, reason=text or f"{self.path} is there")


@dataclass(frozen=True, kw_only=True)
class FunctionNotices:
    """A notice is there when the function returns one, a reason, or True."""

    function: NoticeFunction
    interval: float = 1.0
    name: str = "function"

    def look(self, now: float) -> Notice | None:
        called = getattr(self.function, "__name__", repr(self.function))
        try:
            found = self.function()
        except Exception as error:  # it is the user's and may raise anything
            raise SourceProblem(f"{called} failed: {type(error).__name__}: {error}") from error
        if found is None or found is False:
            return None
        if isinstance(found, Notice):
            return found
        if isinstance(found, str):
            return Notice(source=self.name, reason=found[:MAX_REASON] or called)
        if found is True:
            return Notice(source=self.name, reason=f"{called} says so")
        raise SourceProblem(f"{called} returned {found!r}; expected None, a reason, True or a Notice")


@dataclass(frozen=True, kw_only=True)
class SignalNotices:
    """The first of these signals to the agent is a notice; ``grace`` are the seconds left then, if they are known."""

    signals: tuple[signal.Signals, ...]
    grace: float | None = None
    name: str = "signal"

    def notice(self, signum: signal.Signals, now: float) -> Notice:
        at = None if self.grace is None else now + self.grace
        return Notice(source=self.name, reason=f"the agent got {signum.name}", at=at)
