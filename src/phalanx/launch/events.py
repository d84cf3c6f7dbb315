"""Writes what happens to a job, one typed event per change of state, as JSON lines.

Owns the event types, their JSON, the file that an agent appends them to (under the log directory), and the
handlers that ``--event-log-handler`` names. A line is one ``write`` to a file opened for appending, so agents
of one machine may share it and a crash leaves at most one torn line, which ``read_events`` reports and skips.
Writing an event never fails a job: an error is logged once.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from phalanx._fields import Fields, load_json, short

log = logging.getLogger(__name__)

VERSION = 1


class EventSource(str, Enum):
    """Says who saw it."""

    AGENT = "AGENT"
    WORKER = "WORKER"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Holds a free-form event: what is not one of the types below."""

    name: str
    source: EventSource = EventSource.AGENT
    timestamp: float = 0.0
    metadata: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    kind: ClassVar[str] = "event"


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Holds what all typed events say. ``time`` (seconds since 1970) is filled in when it is written."""

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
    kind: ClassVar[str] = "generation_formed"


@dataclass(frozen=True, kw_only=True)
class GenerationEnded(JobEvent):
    how: str
    reason: str
    kind: ClassVar[str] = "generation_ended"


@dataclass(frozen=True, kw_only=True)
class WorkerEvent(JobEvent):
    """Holds what events about one worker's process say."""

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
    kind: ClassVar[str] = "worker_hung"


@dataclass(frozen=True, kw_only=True)
class JobWentBack(JobEvent):
    """All workers were lost, and those that came after them began with an earlier step; ``count`` times so far."""

    from_step: int
    to_step: int
    count: int
    kind: ClassVar[str] = "job_went_back"


@dataclass(frozen=True, kw_only=True)
class ShutDown(JobEvent):
    reason: str
    succeeded: bool
    kind: ClassVar[str] = "shut_down"


EVENT_TYPES: dict[str, type[JobEvent] | type[Event]] = {
    kind.kind: kind
    for kind in (
        Event,
        GenerationFormed,
        GenerationEnded,
        WorkerStarted,
        WorkerExited,
        WorkerReplaced,
        JobRestarted,
        WorkerHung,
        JobWentBack,
        ShutDown,
    )
}

AnyEvent = JobEvent | Event


def to_json(event: AnyEvent, *, now: float | None = None) -> str:
    """Return one line without its end; an absent time or host is filled in."""
    record = {"v": VERSION, "kind": event.kind, **asdict(event)}
    stamp = "timestamp" if isinstance(event, Event) else "time"
    record[stamp] = record[stamp] or (time.time() if now is None else now)
    if record.get("host") == "":
        record["host"] = socket.gethostname()
    return json.dumps(record, separators=(",", ":"))


def from_json(line: str) -> AnyEvent:
    """Return the event of a line; ``ValueError`` when it is none."""
    fields = Fields(load_json(line, "an event"), "an event")
    kind = fields.text("kind")
    if fields.get("v") != VERSION or kind not in EVENT_TYPES:
        raise ValueError(f"event {kind!r} of version {short(fields.get('v'))} is not known to this release")
    made = EVENT_TYPES[kind]
    return made(**{one.name: _field(fields, one) for one in dataclasses.fields(made)})


def _field(fields: Fields, one: dataclasses.Field[Any]) -> Any:
    """Return a field as its type says; what is absent has its default, if there is one."""
    default: Any = one.default
    if one.name == "metadata":
        return fields.mapping("metadata", default={})
    if one.name == "source":
        return EventSource(fields.text("source"))
    if default is not dataclasses.MISSING and fields.get(one.name, fields) is fields:
        return default
    read: dict[str, Callable[[str], Any]] = {
        "str": fields.text,
        "int": fields.integer,
        "float": fields.number,
        "bool": fields.flag,
    }
    return read[str(one.type)](one.name)


def read_events(path: str | Path) -> Iterator[AnyEvent]:
    """Return the events of a file, in order; a line that does not parse is logged and skipped."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield from_json(line)
            except ValueError as error:
                log.warning("%s, line %d: %s", path, number, error)


class EventLog:
    """Appends events to a file and passes them on to one more handler.

    >>> EventLog(None).write(ShutDown(job="demo", reason="done", succeeded=True))
    """

    def __init__(self, path: str | Path | None, handler: EventHandler | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._handler = handler
        self._file: int | None = None
        self._failed = False
        self._is_torn = False

    def write(self, event: AnyEvent) -> None:
        line = to_json(event)
        try:
            if self._path is not None:
                self._append(line)
            if self._handler is not None:
                self._handler(line)
        except Exception as error:  # a handler is the user's and may raise anything
            if not self._failed:
                log.warning("cannot write events to %s: %s; the job goes on", self._path, error)
            self._failed = True
        else:
            if self._failed:
                log.warning("events can be written to %s again; some are missing", self._path)
            self._failed = False

    def _append(self, line: str) -> None:
        assert self._path is not None, "only called with a path"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data = (b"\n" if self._is_torn else b"") + line.encode() + b"\n"
        self._is_torn = os.write(self._file, data) < len(data)  # a disk that is nearly full takes a part
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


EventHandler = Callable[[str], None]
"""Takes one line of JSON."""


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
    raise ValueError(
        f"no event handler {name!r}; there are {sorted(HANDLERS)} and entry points phalanx.events"
    )
