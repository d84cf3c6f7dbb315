"""Offers the typed events of a job, their JSON and their file, and the handlers that ``--event-log-handler`` names.

The types are those of ``phalanx.events``: agents and workers write the same kind of line. A line is one ``write`` to a
file opened for appending, so agents of one machine may share it and a crash leaves at most one torn line, which
``read_events`` reports and skips. Writing an event never fails a job.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from phalanx.events._event_types import (
    EVENT_TYPES,
    AnyEvent,
    Event,
    EventSource,
    GenerationEnded,
    GenerationFormed,
    JobEvent,
    JobRestarted,
    JobWentBack,
    ShutDown,
    TrainingEvent,
    WorkerEvent,
    WorkerExited,
    WorkerHung,
    WorkerReplaced,
    WorkerStarted,
)
from phalanx.events._lines import VERSION, from_json, read_events, to_json
from phalanx.events._writer import EventHandler, EventLog

__all__ = [
    "EVENT_TYPES",
    "HANDLERS",
    "VERSION",
    "AnyEvent",
    "Event",
    "EventHandler",
    "EventLog",
    "EventSource",
    "GenerationEnded",
    "GenerationFormed",
    "JobEvent",
    "JobRestarted",
    "JobWentBack",
    "ShutDown",
    "TrainingEvent",
    "WorkerEvent",
    "WorkerExited",
    "WorkerHung",
    "WorkerReplaced",
    "WorkerStarted",
    "from_json",
    "get_event_handler",
    "read_events",
    "to_json",
]


def _to_console(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


HANDLERS: Mapping[str, EventHandler | None] = {"null": None, "console": _to_console}


def get_event_handler(name: str) -> EventHandler | None:
    """Return what ``--event-log-handler`` stands for: ``null``, ``console``, or an entry point of
    ``phalanx.events``."""
    if name in HANDLERS:
        return HANDLERS[name]
    from importlib.metadata import entry_points  # start-up speed: few ask for it

    for entry in entry_points(group="phalanx.events", name=name):
        handler: EventHandler = entry.load()
        return handler
    raise ValueError(f"no event handler {name!r}; there are {sorted(HANDLERS)} and entry points phalanx.events")
