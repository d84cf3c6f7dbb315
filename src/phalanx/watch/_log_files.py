"""Reads what workers wrote to their log files: those of one directory, and what was added since the last look.

Used by ``phalanx logs`` for files of its own machine, and by an agent for its own directory, whose new lines it gives
to whoever asks with the job's token. Only regular files that really lie in that directory are opened, under the names
that an agent gives them; what somebody asks for is compared with these names and never made a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.events._agent_events import WorkerStarted
from phalanx.events._lines import read_events

MAX_ANSWER = 1 << 20
"""Bytes of log files in one answer."""
MAX_FILES = 500
"""Of the newest generations, whose lines one answer may hold."""


class LogFile(NamedTuple):
    """The file of one stream of one worker, and who that was, as its agent's events tell."""

    path: Path
    name: str
    """Generation, local rank, stream: what it is called in an answer."""
    rank: int
    host: str
    stream: str


def log_files(directories: list[Path]) -> Iterator[LogFile]:
    """Yield the log files of the runs in these directories."""
    for directory in directories:
        for events in sorted({*directory.glob("events.jsonl"), *directory.glob("*/events.jsonl")}):
            yield from files_of_run(events)


def files_of_run(events: Path) -> Iterator[LogFile]:
    """Yield the log files beside the file of an agent's events."""
    who = _started(events)
    inside = os.path.realpath(events.parent) + os.sep
    for path in sorted(events.parent.glob("attempt_*/*/std*.log")):
        attempt, local = path.parent.parent.name.removeprefix("attempt_"), path.parent.name
        is_own = path.stem in ("stdout", "stderr") and os.path.realpath(path).startswith(inside) and path.is_file()
        if attempt.isdecimal() and local.isdecimal() and is_own:
            rank, host = who.get((int(attempt), int(local)), (int(local), ""))
            yield LogFile(path, f"{attempt}.{local}.{path.stem}", rank, host, path.stem)


def _started(events: Path) -> dict[tuple[int, int], tuple[int, str]]:
    """By generation and local rank: the rank and host of each worker that an agent started."""
    return {
        (event.generation, event.local_rank): (event.rank, event.host)
        for event in read_events(events)
        if isinstance(event, WorkerStarted)
    }


def new_lines(path: Path, position: int, limit: int = -1) -> tuple[list[str], int]:
    """Return the complete lines after a position, within ``limit`` bytes, and the position after them.

    A line that is longer than any answer comes in pieces.
    """
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read(limit)
    except OSError:
        return [], position
    end = data.rfind(b"\n") + 1
    if not end and len(data) == limit == MAX_ANSWER:
        end = limit
    return data[:end].decode(errors="replace").splitlines(), position + end


def lines_since(events: Path, rank: str, node: str, since: str) -> dict[str, Any]:
    """Return the new lines of an agent's workers; ``since`` is what the last answer said, "" at first."""
    positions = read_positions(since)
    files = sorted(files_of_run(events), key=lambda file: int(file.name.partition(".")[0]))[-MAX_FILES:]
    told: list[dict[str, Any]] = []
    after: dict[str, int] = {}
    left = MAX_ANSWER
    for file in files:
        position = positions.get(file.name, 0)
        if (not rank or rank == str(file.rank)) and file.host.startswith(node) and left > 0:
            lines, after[file.name] = new_lines(file.path, position, left)
            left -= after[file.name] - position
            if left < MAX_ANSWER and _size(file.path) - after[file.name] >= left:
                left = 0  # the next line, or what there is of it, may be longer than what is left
            told += [{"rank": file.rank, "host": file.host, "stream": file.stream, "line": line} for line in lines]
        else:
            after[file.name] = position
    since = ",".join(f"{name}:{position}" for name, position in after.items() if position)
    return {"lines": told, "files": len(files), "since": since, "more": left <= 0}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_positions(text: str) -> dict[str, int]:
    """Return the position in each file that an earlier answer told; what is none is left out.

    >>> read_positions("0.1.stderr:12,../x,0.1.stdout:-3,1.0.stdout:7")
    {'0.1.stderr': 12, '1.0.stdout': 7}
    """
    pairs = (one.partition(":") for one in text.split(","))
    return {name: int(number) for name, _, number in pairs if number.isdecimal() and len(number) < 16}
