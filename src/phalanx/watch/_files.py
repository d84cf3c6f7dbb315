"""Reads the event files of a job: all at once, or what was added since the last look.

Files are ``events.jsonl`` (an agent's) and ``events-WORKER.jsonl``, in a directory or below it. A line counts when it
is complete.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from phalanx.events._event_types import AnyEvent
from phalanx.events._lines import from_record
from phalanx.watch._hub import Hub

CHUNK = 1 << 20
LOOK_EVERY = 0.25
"""Seconds between two looks for new files and lines."""
TRUSTED = 2.0
"""Seconds for which a list of files is good at most."""
YOUNG = 0.1
"""Seconds within which a directory may change again without showing it."""


def find_event_files(directory: Path, *, depth: int = 2) -> list[Path]:
    """Return the event files in a directory and some levels below: a run's, an attempt's."""
    found: dict[str, Path] = {}
    for level in range(depth + 1):
        pattern = "*/" * level + "events*.jsonl"
        for path in sorted(directory.glob(pattern)):
            found.setdefault(os.path.realpath(path), path)  # a link and what it points at are one
    files = {path.name for path in found.values() if not path.is_symlink()}
    # In a copy of a directory a link points at the original of a file that was copied too.
    return [path for path in found.values() if not path.is_symlink() or path.name not in files]


class Listing:
    """The event files of one directory, found again only when there may be others: an agent looks often.

    A directory whose own time has changed has other entries. That time is as coarse as the kernel's clock, and in a
    network it is another machine's: what is young is not trusted, and nothing is for longer than ``TRUSTED``.
    """

    def __init__(self, directory: Path, depth: int, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._depth = depth
        self._clock = clock
        self._listed = (0, 0.0)
        """When the directory had changed, and when it was listed."""
        self._found: list[tuple[Path, str]] = []

    def files(self) -> list[tuple[Path, str]]:
        """Return the files, each with what it really is."""
        now = self._clock()
        try:
            changed = os.stat(self._directory).st_mtime_ns
        except OSError:
            changed = 0
        before, when = self._listed
        is_settled = not self._depth and changed == before and changed / 1e9 < when - YOUNG
        if not is_settled or not 0.0 <= now - when < TRUSTED:
            self._listed = (changed, now)
            paths = find_event_files(self._directory, depth=self._depth)
            self._found = [(path, os.path.realpath(path)) for path in paths]
        return self._found


class Taker(Protocol):
    """What takes the lines: a hub, or a command that shows them."""

    def add_records(self, lines: Sequence[tuple[Any, str]]) -> None:
        """Take what many lines say, each with its text."""


class Tail:
    """The new lines of some files: ``look`` gives them to a hub, in the order of their times."""

    def __init__(self, hub: Taker, directories: Iterable[Path], *, but: Iterable[Path] = (), depth: int = 2) -> None:
        """``but``: files that are left out; ``depth``: how many levels below the directories are looked at."""
        self._hub = hub
        self._listings = [Listing(directory, depth) for directory in directories]
        self._but = {os.path.realpath(path) for path in but}
        self._read: dict[Path, int] = {}
        self._lock = threading.Lock()

    def look(self) -> int:
        """Give the hub what was added since the last look; how many lines that was."""
        with self._lock:
            lines: list[tuple[Any, str]] = []
            for listing in self._listings:
                for path, real in listing.files():
                    if real not in self._but:
                        lines += self._new_lines(path)
            lines.sort(key=lambda line: time_of_record(line[0]))
            self._hub.add_records(lines)
            return len(lines)

    def _new_lines(self, path: Path) -> Iterator[tuple[Any, str]]:
        position = self._read.get(path, 0)
        try:
            if os.stat(path).st_size <= position:
                return
            with path.open("rb") as file:
                file.seek(position)
                while True:
                    data = file.read(CHUNK)
                    if b"\n" not in data:
                        data += file.readline()
                    whole = data[: data.rfind(b"\n") + 1]
                    if not whole:
                        break
                    position += len(whole)
                    file.seek(position)
                    yield from parse(whole)
        except OSError:
            pass
        self._read[path] = position

    def follow(self, stopped: threading.Event) -> None:
        """Look again and again, until told to stop."""
        while not stopped.wait(LOOK_EVERY):
            self.look()


def parse(data: bytes) -> Iterator[tuple[Any, str]]:
    """Yield what complete lines say, with their text; None for one that is no JSON."""
    for line in data.split(b"\n"):
        if line:
            try:
                text = line.decode()
                yield json.loads(text), text
            except (ValueError, RecursionError):
                yield None, ""


def time_of_record(record: Any) -> float:
    """Return when an event was told; 0 for what is none."""
    value: Any = record.get("time", record.get("timestamp", 0.0)) if isinstance(record, dict) else 0.0
    return float(value) if type(value) in (int, float) and abs(value) < 1e12 else 0.0


def read_job_events(directory: Path) -> Iterator[AnyEvent]:
    """Yield the events of all files of a job, in the order of their times."""

    def of(path: Path) -> Iterator[Any]:
        try:
            yield from (record for record, _ in parse(path.read_bytes().rpartition(b"\n")[0] + b"\n"))
        except OSError:
            return

    for record in heapq.merge(*(of(path) for path in find_event_files(directory)), key=time_of_record):
        try:
            yield from_record(record)
        except ValueError:
            continue


def load_hub(directory: Path) -> Hub:
    """Return a hub with all events of a job's directory."""
    hub = Hub()
    Tail(hub, [directory]).look()
    return hub
