"""Files of JSON lines that a worker appends to: its events, and the audit of the samples it computed.

Every line reaches the operating system before the call returns, so what a killed process wrote before it died is
there. A worker writes only its own files; ``phalanx.elastic.audit`` reads those of all workers together.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, BinaryIO


class JsonLines:
    """An append-only file of JSON objects; with ``path=None`` nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Audit(JsonLines):
    """Which worker computed which samples for which step, and which steps it committed.

    ``lineage`` is (resumes from disk, generation, round): of several commits of one step, that of the largest counts,
    because the others were lost with the workers that made them.
    """

    def begin(self, job: dict[str, Any]) -> None:
        self.write({"kind": "job", **job})

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


class Events(JsonLines):
    """What happened to the job, with wall-clock times."""

    def __init__(self, path: Path | None, worker_id: str) -> None:
        super().__init__(path)
        self.worker_id = worker_id

    def emit(self, event: str, **details: Any) -> None:
        self.write({"time": time.time(), "event": event, "worker": self.worker_id, **details})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a last line cut short by a kill is left out."""
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        records.append(json.loads(line))
    return records
