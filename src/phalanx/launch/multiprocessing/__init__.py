"""Starts copies of a function or a command and watches them, without a rendezvous: ``start_processes``.

For agents of your own and for tools; the agents here start their workers by the same means (``workers``).

>>> from phalanx.launch.multiprocessing import DefaultLogsSpecs, Std, start_processes
>>> context = start_processes(                                                     # doctest: +SKIP
...     "echo", "echo", {0: ("hello",), 1: ("world",)}, {0: {}, 1: {}}, DefaultLogsSpecs("logs", redirects=Std.ALL)
... )
>>> open(context.wait().stdouts[1]).read()                                          # doctest: +SKIP
'world\\n'
"""

from __future__ import annotations

from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.multiprocessing._contexts import MultiprocessContext, SubprocessContext, start_processes
from phalanx.launch.multiprocessing._interface import PContext, RunProcsResult
from phalanx.launch.system._signals import SignalException
from phalanx.launch.telemetry._logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]
