"""Offers the typed events of a job, their JSON and their file, and the handlers that ``--event-log-handler`` names.

The types are those of ``phalanx.events``: agents and workers write the same kind of line. A line is one ``write`` to a
file opened for appending, so agents of one machine may share it and a crash leaves at most one torn line, which
``read_events`` reports and skips. Writing an event never fails a job.

Events of your own go to the same handlers by ``record``, through a logger ``torchelastic-events-<handler>``:

>>> record(Event("saved", EventSource.WORKER, metadata={"step": 3}), "null")
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum

from phalanx.events._agent_events import (
    ActionAsked,
    GenerationEnded,
    GenerationFormed,
    JobEvent,
    JobRestarted,
    JobWentBack,
    LimitReached,
    NodeLoad,
    NodeNoticed,
    ShutDown,
    WorkerEvent,
    WorkerExited,
    WorkerFailed,
    WorkerHung,
    WorkerReplaced,
    WorkerStarted,
)
from phalanx.events._event_types import EVENT_TYPES, AnyEvent, TrainingEvent
from phalanx.events._free_event import Event, EventMetadataValue, EventSource
from phalanx.events._lines import VERSION, from_json, read_events, to_json
from phalanx.events._writer import EventHandler, EventLog

__all__ = [
    "EVENT_TYPES",
    "HANDLERS",
    "VERSION",
    "ActionAsked",
    "AnyEvent",
    "Event",
    "EventHandler",
    "EventLog",
    "EventMetadataValue",
    "EventSource",
    "GenerationEnded",
    "GenerationFormed",
    "JobEvent",
    "JobRestarted",
    "JobWentBack",
    "LimitReached",
    "NodeLoad",
    "NodeNoticed",
    "NodeState",
    "RdzvEvent",
    "ShutDown",
    "TrainingEvent",
    "WorkerEvent",
    "WorkerExited",
    "WorkerFailed",
    "WorkerHung",
    "WorkerReplaced",
    "WorkerStarted",
    "construct_and_record_rdzv_event",
    "from_json",
    "get_event_handler",
    "get_logging_handler",
    "read_events",
    "record",
    "record_rdzv_event",
    "to_json",
]


def _to_console(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


HANDLERS: Mapping[str, EventHandler | None] = {"null": None, "console": _to_console, "dynamic_rendezvous": None}


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


class NodeState(str, Enum):
    """Says what a node does in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class RdzvEvent:
    """An event of a rendezvous, as handlers of your own may tell it by ``construct_and_record_rdzv_event``."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def serialize(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    __str__ = serialize

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Return the event of such a text; an event is returned as it is."""
        if isinstance(data, RdzvEvent):
            return data
        found = json.loads(data)
        return RdzvEvent(**{**found, "node_state": NodeState[found["node_state"]]})


class _LineHandler(logging.Handler):
    """Gives what is logged to an event handler."""

    def __init__(self, handler: EventHandler) -> None:
        super().__init__()
        self._handler = handler

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._handler(record.getMessage())
        except Exception:
            self.handleError(record)


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of a name (see ``get_event_handler``) for Python's logging."""
    handler = get_event_handler(destination)
    return logging.NullHandler() if handler is None else _LineHandler(handler)


def record(event: Event, destination: str = "null") -> None:
    """Write an event to the handler of a name."""
    _logger(destination).info("%s", event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Write an event of a rendezvous; it goes nowhere unless the logger is given a handler."""
    _logger("dynamic_rendezvous").info("%s", event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Write an event of a rendezvous; who called is found out, and with ``FAILED`` the exception that is handled."""
    code = sys._getframe(1).f_code
    event = RdzvEvent(
        name=f"{os.path.basename(code.co_filename)}:{name or code.co_name}",
        run_id=run_id,
        message=message,
        hostname=hostname or socket.getfqdn(),
        pid=pid or os.getpid(),
        node_state=node_state,
        master_endpoint=master_endpoint,
        rank=rank,
        local_id=local_id,
        error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
    )
    record_rdzv_event(event)


def _logger(destination: str) -> logging.Logger:
    logger = logging.getLogger(f"torchelastic-events-{destination}")
    if not logger.handlers:
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False  # one event is one line, whatever else is logged
        logger.addHandler(get_logging_handler(destination))
    return logger
