"""Defines a set of processes that are started, watched and ended together: ``PContext``.

Owns the waiting, the signals of the process that waits, and what became of the set. How processes are started is for a
derived class: ``_contexts`` has two. All or nothing: the set has failed as soon as one of it has.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.system._signals import SignalException, choose_signals
from phalanx.launch.telemetry._logs import LogsSpecs


@dataclass
class RunProcsResult:
    """Says what became of the processes, by local rank: values of functions, failures, and where their output is."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return bool(self.failures)


class PContext(ABC):
    """A set of processes. Between ``start`` and ``close``, signals to this process raise ``SignalException``."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self.logs_dest = logs_specs.reify(envs)
        for what, found in (("stdouts", self.logs_dest.stdouts), ("stderrs", self.logs_dest.stderrs)):
            check_ranks(found, self.nprocs, what)
        self.stdouts = self.logs_dest.stdouts
        self.stderrs = self.logs_dest.stderrs
        self.error_files = self.logs_dest.error_files
        self.log_line_prefixes = dict(log_line_prefixes or {})
        self.duplicate_stdout_filters = duplicate_stdout_filters
        self.duplicate_stderr_filters = duplicate_stderr_filters
        self._previous: dict[signal.Signals, Any] = {}

    @abstractmethod
    def _start(self) -> None:
        """Start the processes."""

    @abstractmethod
    def _poll(self) -> RunProcsResult | None:
        """Return what became of them once all have succeeded or one has failed; None before that."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Return process ids by local rank."""

    @abstractmethod
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End what still runs: ``death_sig``, after ``timeout`` seconds SIGKILL."""

    def start(self) -> None:
        """Start the processes; once."""
        if threading.current_thread() is threading.main_thread():
            for signum in choose_signals(None, os.environ):
                self._previous[signum] = signal.signal(signum, _raise)
        self._start()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed, and say so; None after ``timeout`` seconds.

        0 looks once, a negative timeout waits for ever. ``period``: seconds between two looks, at most.
        """
        until = float("inf") if timeout < 0 else time.monotonic() + timeout
        while True:
            result = self._poll()
            left = until - time.monotonic()
            if result is not None or left <= 0:
                return result
            self._pause(min(left, period))

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End what still runs, and give up what was opened. A second call does nothing."""
        self._close(death_sig=death_sig or signal.SIGTERM, timeout=timeout)
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) is _raise:
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()


def _raise(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum)
    raise SignalException(f"process {os.getpid()} got {name.name}", sigval=name)


def check_ranks(by_rank: Mapping[int, Any], count: int, what: str) -> None:
    """``RuntimeError`` unless there is something for each local rank."""
    if set(by_rank) != set(range(count)):
        raise RuntimeError(f"{what} are for local ranks {sorted(by_rank)}; expected one for each of 0 to {count - 1}")
