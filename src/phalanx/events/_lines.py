"""Writes an event as one line of JSON and reads it back, each field as its type says.

An agent's line is ``{"v":1,"kind":...}``, a worker's ``{"time":...,"event":...,"worker":...}``; both are read here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

from phalanx._fields import MAX_INTEGER, Fields, load_json, read_dataclass, short
from phalanx.events._event_types import EVENT_TYPES, AnyEvent, StepCommitted, TrainingEvent
from phalanx.events._free_event import Event, EventSource

log = logging.getLogger(__name__)

VERSION = 1


_encode = json.JSONEncoder(separators=(",", ":")).encode
"""Made once: a worker writes a line for each step."""


@cache
def _own_fields(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a worker's event, and which of them are left out when they are None."""
    fields = (one for one in dataclasses.fields(kind) if one.name not in ("time", "worker"))
    return tuple((one.name, one.default is None) for one in fields)


def to_record(event: AnyEvent, *, now: float | None = None, worker: str = "") -> dict[str, Any]:
    """Return what a line says; an absent time, host or worker is filled in."""
    now = time.time() if now is None else now
    if isinstance(event, TrainingEvent):
        record: dict[str, Any] = {"time": event.time or now, "event": event.kind, "worker": event.worker or worker}
        for name, is_optional in _own_fields(cast(Any, type(event))):  # a class can be hashed, whatever mypy says
            value = getattr(event, name)
            if value is not None or not is_optional:
                record[name] = value
        return record
    record = {"v": VERSION, "kind": event.kind, **dataclasses.asdict(event)}
    stamp = "timestamp" if isinstance(event, Event) else "time"
    record[stamp] = record[stamp] or now
    if record.get("host") == "":
        record["host"] = socket.gethostname()
    return record


def dump(record: dict[str, Any]) -> str:
    return _encode(record)


def to_json(event: AnyEvent, *, now: float | None = None) -> str:
    """Return one line without its end; an absent time or host is filled in."""
    return dump(to_record(event, now=now))


def step_line(event: StepCommitted, worker: str, now: float) -> str:
    """Return the line of a committed step; ``worker`` as JSON. The same as ``dump(to_record(event))`` would give.

    Workers write one for each step, between two steps whose tensors have filled the processor's caches: then every
    call costs several times what it costs in a loop, and this one makes few.
    """
    loss = event.loss
    if event.time or event.worker or type(loss) is not float or loss - loss != 0.0:
        record = to_record(event, now=now)
        record["worker"] = event.worker or json.loads(worker)
        return dump(record)
    size = "" if event.world_size is None else f',"world_size":{event.world_size}'
    return (
        f'{{"time":{now},"event":"step","worker":{worker},"step":{event.step},"epoch":{event.epoch},"loss":{loss},'
        f'"samples":{event.samples},"generation":{event.generation},"round":{event.round}{size}}}'
    )


def from_json(line: str | bytes) -> AnyEvent:
    """Return the event of a line; ``ValueError`` when it is none."""
    return from_record(load_json(line, "an event"))


def from_record(record: Any) -> AnyEvent:
    """Return the event of what a line says; ``ValueError`` when it is none."""
    step = _usual_step(record)
    if step is not None:
        return step
    fields = Fields(record, "an event")
    is_workers = fields.get("event") is not None
    kind = fields.text("event" if is_workers else "kind")
    made = EVENT_TYPES.get(kind)
    if made is None or issubclass(made, TrainingEvent) != is_workers or not (is_workers or fields.get("v") == VERSION):
        raise ValueError(f"event {kind!r} of version {short(fields.get('v'))} is not known to this release")
    if made is Event:
        return Event(
            name=fields.text("name"),
            source=EventSource(fields.text("source")),
            timestamp=fields.number("timestamp", default=0.0),
            metadata=fields.mapping("metadata", default={}),
        )
    if is_workers:
        fields.number("time"), fields.text("worker")  # without them it is no event
    return read_dataclass(made, fields)


def _usual_step(record: Any) -> StepCommitted | None:
    """Return a committed step whose line says what ``step_line`` writes; None of all else, which is looked at closely.

    There is one for each step, and reading them is most of what an agent does for the page.
    """
    try:
        if record["event"] != "step":
            return None
        moment, worker, step, epoch = record["time"], record["worker"], record["step"], record["epoch"]
        loss, samples, generation, number = record["loss"], record["samples"], record["generation"], record["round"]
        size = record.get("world_size")
    except (TypeError, KeyError):
        return None
    counts = (
        (step, epoch, samples, generation, number) if size is None else (step, epoch, samples, generation, number, size)
    )
    for count in counts:
        if type(count) is not int or not 0 <= count <= MAX_INTEGER:
            return None
    if type(worker) is not str or not worker.isascii() or type(moment) is not float or type(loss) is not float:
        return None
    if moment - moment != 0.0 or loss - loss != 0.0:  # not finite
        return None
    return StepCommitted(
        time=moment,
        worker=worker,
        step=step,
        epoch=epoch,
        loss=loss,
        samples=samples,
        generation=generation,
        round=number,
        world_size=size,
    )


def read_events(path: str | Path) -> Iterator[AnyEvent]:
    """Return the events of a file, in order; a line that does not parse is logged and skipped."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield from_json(line)
            except ValueError as error:
                log.warning("%s, line %d: %s", path, number, error)
