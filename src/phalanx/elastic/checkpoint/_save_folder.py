"""Keeps the folder of a job's saves: a new one appears as a whole, old ones go, the newest readable one is found.

Guarantees: what ``write_save`` returns is there; the newest readable save is never removed; of those older than the
``keep`` newest *readable* ones nothing stays, so damaged saves never push good ones out. Whether a save is readable
(see ``_saves``) costs a pass over its bytes, so it is found out once: ``Known`` remembers what was written or checked
here, by size, time and inode of its files. Damage that changes none of these is found when the save is read.
A save is written under ``.partial-STEP-HOST-PID.START.COUNT`` and renamed; a failed one is removed at once, that of a
killed process (no process has its number and start time any more) by the next write.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from phalanx.elastic.checkpoint._saves import (
    STATE,
    TENSORS,
    Save,
    SaveError,
    check_save,
    name_of,
    read_save,
    step_of,
    sync,
    write_files,
)
from phalanx.elastic.checkpoint._state_codec import Json

PARTIAL = ".partial-"
_count = itertools.count()

Marks = tuple[tuple[int, int, int], ...]
"""Size, time and inode of a save's files."""
Known = dict[str, tuple[Marks, bool]]
"""By a save's name: how its files looked when they were checked, and whether it was readable."""


def write_save(
    directory: Path,
    step: int,
    tree: Json,
    tensors: Sequence[Tensor],
    *,
    keep: int,
    secret: bytes = b"",
    known: Known | None = None,
) -> Path:
    """Write a save durably, then remove what is older than the newest ``keep`` readable ones.

    ``OSError`` when the disk does not take it; nothing is left of it then.
    """
    known = {} if known is None else known
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    final = directory / name_of(step)
    partial = directory / f"{PARTIAL}{step}-{socket.gethostname()}-{_process()}.{next(_count)}"
    try:
        partial.mkdir()
        write_files(partial, step, tree, tensors, secret)
        _put_in_place(partial, final, secret)
        sync(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    known[final.name] = (_marks(final), True)
    _rotate(directory, final, keep, secret, known)
    return final


def list_saves(directory: Path) -> list[Path]:
    """Everything with a save's name, the newest step first. ``SaveError`` when the folder cannot be looked into."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SaveError(f"{directory} cannot be read: {error}") from error
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return [directory / name for name in sorted(steps, key=lambda name: (steps[name], name), reverse=True)]


def find_save(directory: Path, secret: bytes = b"") -> tuple[Save | None, list[str]]:
    """Return the newest readable save, and what was wrong with newer ones."""
    problems: list[str] = []
    try:
        paths = list_saves(directory)
    except SaveError as error:
        return None, [str(error)]
    for path in paths:
        try:
            return read_save(path, secret), problems
        except SaveError as error:
            problems.append(str(error))
    return None, problems


def is_readable(path: Path, secret: bytes, known: Known) -> bool:
    """Return whether a save can be read; looks at its bytes only if its files are not as they were the last time."""
    try:
        marks = _marks(path)
    except OSError:
        return False
    before = known.get(path.name)
    if before is not None and before[0] == marks:
        return before[1]
    try:
        check_save(path, secret)
    except SaveError:
        known[path.name] = (marks, False)
    else:
        known[path.name] = (marks, True)
    return known[path.name][1]


def _rotate(directory: Path, written: Path, keep: int, secret: bytes, known: Known) -> None:
    num_readable = 0
    for path in list_saves(directory):
        if num_readable >= keep:
            if path != written:
                shutil.rmtree(path, ignore_errors=True)
                known.pop(path.name, None)
        elif path == written or is_readable(path, secret, known):
            num_readable += 1


def _marks(path: Path) -> Marks:
    found = [(path / name).stat() for name in (STATE, TENSORS)]
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in found)


def _put_in_place(partial: Path, final: Path, secret: bytes) -> None:
    while True:
        try:
            os.rename(partial, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        try:
            check_save(final, secret)
        except SaveError:
            with suppress(FileNotFoundError):  # another worker may be at it too
                final.unlink() if not final.is_dir() else shutil.rmtree(final)
        else:  # the same step, saved before by another worker, maybe just now: the same content
            shutil.rmtree(partial)
            return


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed writers of this machine began; another worker may be writing its own just now."""
    for leftover in directory.glob(f"{PARTIAL}*"):
        host, _, process = leftover.name.removeprefix(PARTIAL).partition("-")[2].rpartition("-")
        if host == socket.gethostname() and not _is_alive(process):
            shutil.rmtree(leftover, ignore_errors=True)


def _process() -> str:
    return f"{os.getpid()}.{_start_of(os.getpid())}"


def _is_alive(process: str) -> bool:
    """Return whether the process of a name's last part, ``PID.START.COUNT``, lives. Numbers come again, in containers
    soon."""
    pid, _, rest = process.partition(".")
    if not (pid.isascii() and pid.isdigit() and len(pid) < 12):
        return True  # not ours to judge
    start = _start_of(int(pid))
    return bool(start) and (not rest or rest.partition(".")[0] == start)


def _start_of(pid: int) -> str:
    """Return when a process was started, as the kernel counts; empty if there is none, "?" where nobody tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "?"
