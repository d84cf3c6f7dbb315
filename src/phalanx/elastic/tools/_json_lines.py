"""Files of JSON lines that a worker appends to: its events, and the audit of the samples it computed.

Every line reaches the operating system before the call returns, so what a killed process wrote before it died is
there. A disk that does not take a line never fails a step: the lines wait in memory, up to ``MAX_PENDING`` bytes, and
are tried again with growing pauses; those beyond are counted, and the file says so once it can be written again. A
worker writes only its own files; ``phalanx.elastic.audit`` reads those of all workers together.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from phalanx.elastic.tools._troubles import Backoff, Troubles

MAX_PENDING = 16 << 20
"""Bytes of lines that wait for a disk to take them; some hundred thousand steps of a worker with few slots."""


class JsonLines:
    """An append-only file of JSON objects; with ``path=None`` nothing is written. Any thread may write."""

    what = "lines"

    def __init__(self, path: Path | None, *, troubles: Troubles | None = None) -> None:
        self.path = path
        self.num_lost = 0
        """Lines that were given up because too many waited already."""
        self._troubles = troubles or Troubles()
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._fd = -1
        self._pending = bytearray()

    def write(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        line = _line(record)
        with self._lock:
            if len(self._pending) + len(line) > MAX_PENDING:
                self.num_lost += 1
            else:
                self._pending += line
            if not self._backoff.pause:
                self._flush()

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
        """What the file says in the place of lines that were given up."""
        return {"kind": "lost", "lines": count}

    def _flush(self) -> None:
        """Append what waits. A write may take a part of it: the rest follows later, so no line is ever torn."""
        try:
            self._open()
            self._drain()
            if self.num_lost:
                self._pending += _line(self.lost_record(self.num_lost))
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
        while self._pending:
            count = os.write(self._fd, self._pending)
            del self._pending[:count]

    def _open(self) -> None:
        if self._fd >= 0:
            return
        assert self.path is not None, "only called with a path"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._pending[:0] = b"\n"  # a killed process of the same name left half a line


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


class Audit(JsonLines):
    """Which worker computed which samples for which step, and which steps it committed.

    ``lineage`` is (attempt, generation, round). An *attempt* is a run of the job from its beginning or from a save; its
    number grows with time. Of several commits of one step in one attempt, that of the largest lineage counts, because
    the others were lost with the workers that made them.
    """

    what = "audit"

    def begin(self, job: dict[str, Any]) -> None:
        self.write({"kind": "job", **job})

    def attempt(self, number: int, step: int, parent: int | None) -> None:
        """An attempt begins at ``step``: with the state that attempt ``parent`` saved, or with none."""
        self.write({"kind": "attempt", "attempt": number, "step": step, "parent": parent})

    def computed(self, lineage: list[int], epoch: int, step: int, slot: int, indices: list[int]) -> None:
        self.write(
            {
                "kind": "slot",
                "lineage": lineage,
                "epoch": epoch,
                "step": step,
                "slot": slot,
                "indices": indices,
            }
        )

    def committed(self, lineage: list[int], epoch: int, step: int) -> None:
        self.write({"kind": "commit", "lineage": lineage, "epoch": epoch, "step": step})

    def ended(self, lineage: list[int], step: int) -> None:
        """The loop is over with ``step`` steps committed: a log that lacks its last lines can be told."""
        self.write({"kind": "end", "lineage": lineage, "step": step})


class Events(JsonLines):
    """What happened to the job, with wall-clock times."""

    what = "events"

    def __init__(self, path: Path | None, worker_id: str, *, troubles: Troubles | None = None) -> None:
        super().__init__(path, troubles=troubles)
        self.worker_id = worker_id

    def emit(self, event: str, **details: Any) -> None:
        self.write({"time": time.time(), "event": event, "worker": self.worker_id, **details})

    def lost_record(self, count: int) -> dict[str, Any]:
        return {"time": time.time(), "event": "lost_events", "worker": self.worker_id, "lines": count}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a last line cut short by a kill is left out, and so is what is no object."""
    return parse_lines(path.read_bytes())[0]


def parse_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The objects of complete lines, and how many complete lines are none."""
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
