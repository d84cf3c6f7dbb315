"""Offers contexts of processes under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.multiprocessing._contexts import MultiprocessContext, SubprocessContext
from phalanx.launch.multiprocessing._interface import PContext, RunProcsResult
from phalanx.launch.system._signals import SignalException
from phalanx.launch.telemetry._logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "to_map",
]
