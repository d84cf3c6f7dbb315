"""Appends lines of JSON to a file that a disk may not take just now: events of agents and workers, and audits.

Every line reaches the operating system before the call returns, so what a killed process wrote before it died is
there. A disk that does not take a line never fails a job: the lines wait in memory, up to ``MAX_PENDING`` bytes, and
are tried again with growing pauses; those beyond are counted, and the file says so once it can be written again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.events._agent_events import AgentEventsLost
from phalanx.events._event_types import AnyEvent, EventsLost, StepCommitted
from phalanx.events._lines import dump, step_line, to_record
from phalanx.events._troubles import Backoff, Troubles

log = logging.getLogger(__name__)

MAX_PENDING = 16 << 20
"""Bytes of lines that wait for a disk to take them; some hundred thousand steps of a worker with few slots."""

EventHandler = Callable[[str], None]
"""Takes one line of JSON."""


class JsonLines:
    """An append-only file of JSON objects; with ``path=None`` nothing is written. Any thread may write.

    A file that only this process appends to never holds a torn line. In one that is ``shared``, a line that the disk
    took a part of is written again as a whole: what others wrote in between would else be torn as well.
    """

    what = "lines"

    def __init__(self, path: str | Path | None, *, troubles: Troubles | None = None, is_shared: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.num_lost = 0
        """Lines that were given up because too many waited already."""
        self._troubles = troubles or Troubles()
        self._is_shared = is_shared
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._fd = -1
        self._pending = bytearray()

    def append(self, *records: dict[str, Any]) -> None:
        """Write each object as one line, all of them at once."""
        self._append("\n".join(map(dump, records)))

    def _append(self, text: str) -> None:
        if self.path is None:
            return
        line = text.encode() + b"\n"
        with self._lock:
            if len(self._pending) + len(line) > MAX_PENDING:
                self.num_lost += line.count(b"\n")
            else:
                if self._fd >= 0 and not self._is_shared and not self._pending and not self.num_lost:
                    line = self._rest_of(line)
                    if not line:
                        return  # the usual case: nothing waits, and the disk takes it whole
                self._pending += line
            if not self._backoff.pause:
                self._flush()

    def _rest_of(self, line: bytes) -> bytes:
        """Write a line; what the disk did not take of it."""
        try:
            return line[os.write(self._fd, line) :]
        except OSError:
            return line  # tried again with those that wait, which says what is wrong

    def close(self) -> None:
        """Write what waits, if it can be written now; else say what is missing."""
        with self._lock:
            if self._pending:
                self._flush()
            if self._num_missing:
                self._troubles.lost(
                    self.what,
                    f"the {self.what} in {self.path} is INCOMPLETE: {self._num_missing} lines could not be written",
                )
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    @property
    def _num_missing(self) -> int:
        return self._pending.count(b"\n") + self.num_lost

    def lost_record(self, count: int) -> dict[str, Any]:
        """Return what the file says in the place of lines that were given up."""
        return {"kind": "lost", "lines": count}

    def _flush(self) -> None:
        try:
            self._open()
            self._drain()
            if self.num_lost:
                self._pending += dump(self.lost_record(self.num_lost)).encode() + b"\n"
                self.num_lost = 0
                self._drain()
        except OSError as error:
            delay = self._backoff.fail()
            self._troubles.failed(
                self.what,
                f"the {self.what} cannot be written to {self.path}: {error.strerror or error}; "
                f"{self._num_missing} lines wait, next attempt in {delay:g} s",
            )
        else:
            self._backoff.reset()
            self._troubles.worked(self.what)

    def _drain(self) -> None:
        """Append what waits. A write may take a part of it: the rest follows later."""
        while self._pending:
            count = os.write(self._fd, self._pending)
            if self._is_shared and count < len(self._pending):
                del self._pending[: self._pending.rfind(b"\n", 0, count) + 1]
                self._pending[:0] = b"\n"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            del self._pending[:count]

    def _open(self) -> None:
        if self._fd >= 0:
            return
        assert self.path is not None, "only called with a path"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and not self._is_shared and os.pread(self._fd, 1, size - 1) != b"\n":
            self._pending[:0] = b"\n"  # a killed process of the same name left half a line


class EventLog(JsonLines):
    """Appends events to a file and passes them on to one more handler.

    With ``worker`` it is that worker's own file; else several agents of a machine may share it.

    >>> from phalanx.events._event_types import ShutDown
    >>> EventLog(None).write(ShutDown(job="demo", reason="done", succeeded=True))
    """

    what = "events"

    def __init__(
        self,
        path: str | Path | None,
        handler: EventHandler | None = None,
        *,
        job: str = "",
        worker: str = "",
        troubles: Troubles | None = None,
    ) -> None:
        says = troubles or Troubles(say=log.warning, consequence="the job goes on")
        super().__init__(path, troubles=says, is_shared=not worker)
        self._handler = handler
        self._job, self._worker = job, worker
        self._worker_json = json.dumps(worker)
        self._has_complained = False

    @property
    def is_on(self) -> bool:
        """Return whether what is written goes anywhere."""
        return self.path is not None or self._handler is not None

    def write(self, event: AnyEvent) -> None:
        """Never raises: what cannot be written waits, and is told."""
        if not self.is_on:
            return
        if type(event) is StepCommitted:
            line = step_line(event, self._worker_json, time.time())
        else:
            line = dump(to_record(event, worker=self._worker))
        self._append(line)
        if self._handler is None:
            return
        try:
            self._handler(line)
        except Exception as error:  # a handler is the user's and may raise anything
            if not self._has_complained:
                log.warning("an event handler failed: %s; the job goes on", error)
            self._has_complained = True

    def lost_record(self, count: int) -> dict[str, Any]:
        if not self._worker:
            return to_record(AgentEventsLost(job=self._job, lines=count))
        return to_record(EventsLost(worker=self._worker, lines=count))


def parse_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of complete lines, and how many complete lines are none."""
    records, num_bad = [], 0
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line) if line else None
        except (ValueError, RecursionError):
            num_bad += 1
            continue
        if isinstance(record, dict):
            records.append(record)
        elif line:
            num_bad += 1
    return records, num_bad
