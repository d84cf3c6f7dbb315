"""Keeps the folder of a job's saves: a new one appears as a whole, old ones go, the newest readable one is found.

Guarantees: what ``write_save`` returns is there; the newest readable save is never removed; of those older than the
``keep`` newest *readable* ones nothing stays, so damaged saves never push good ones out. Whether a save is readable
(see ``_saves``) costs a pass over its bytes, so it is found out once: ``Known`` remembers what was written or checked
here, by size, time and inode of its files. Damage that changes none of these is found when the save is read.
A save is *good* when the steps after it, up to the next save, were sound as well (``clean_since``, where the job has
a guard that can tell); the file ``last-good`` names the newest such, and rotation leaves that one alone too.
A save is written under ``.partial-STEP-HOST-PID.START.COUNT`` and renamed; a failed one is removed at once, that of a
killed process (no process has its number and start time any more) by the next write.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from phalanx.elastic.checkpoint._saves import (
    STATE,
    Manifest,
    SaveError,
    check_save,
    name_of,
    step_of,
    sync,
    write_files,
)
from phalanx.elastic.checkpoint._state_codec import Json
from phalanx.storage import Place, RemotePath

PARTIAL = ".partial-"
GOOD = "last-good"
SHARED = "-shared-"
"""Between the step and the group's key, in the name of a folder into which several workers write one save."""
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
    clean_since: int | None = None,
    verify: bool = False,
) -> Path:
    """Write a save durably, then remove what is older than the newest ``keep`` readable ones; the last good one stays.

    ``clean_since`` is the step from which on nothing was wrong: an earlier save since then is now known to be good.
    ``verify``: it is a save only once it was read back from the disk. ``OSError`` when the disk does not take it, or
    gives something else back; nothing is left of it then, and nothing was removed for it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    partial = new_partial(directory, step)
    try:
        partial.mkdir()
        write_files(partial, step, tree, tensors, secret, verify=verify)
        return publish(partial, step, keep=keep, secret=secret, known=known, clean_since=clean_since)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def new_partial(directory: Path, step: int) -> Path:
    """Return the name of a folder in the making, which is removed when this process has died."""
    return directory / f"{PARTIAL}{step}-{socket.gethostname()}-{_process()}.{next(_count)}"


def publish(
    partial: Path, step: int, *, keep: int, secret: bytes, known: Known | None, clean_since: int | None = None
) -> Path:
    """Give a folder that is complete its name as a save, durably; then remove saves that are too old."""
    known = {} if known is None else known
    final = partial.parent / name_of(step)
    _put_in_place(partial, final, secret)
    sync(partial.parent)
    known[final.name] = (_marks(final), True)
    if clean_since is not None:
        _mark_good(partial.parent, step, clean_since, secret, known)
    _rotate(partial.parent, final, keep, secret, known)
    return final


def good_save(directory: Path) -> str:
    """Return the name of the last good save; empty if none is known."""
    try:
        text = (directory / GOOD).read_text(errors="replace").strip()
    except OSError:
        return ""
    return text if step_of(text) is not None and (directory / text).is_dir() else ""


def _mark_good(directory: Path, step: int, clean_since: int, secret: bytes, known: Known) -> None:
    for path in list_saves(directory):
        found = step_of(path.name)
        assert found is not None, "only saves are listed"
        if clean_since <= found < step and is_readable(path, secret, known):
            partial = directory / f"{PARTIAL}{step}-{socket.gethostname()}-{_process()}.good"
            try:
                partial.write_text(path.name)
                os.replace(partial, directory / GOOD)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
            return


def list_saves(directory: Path) -> list[Path]:
    """Everything with a save's name, the newest step first. ``SaveError`` when the folder cannot be looked into."""
    return [directory / name for name in save_names(directory)]


def save_names(directory: Place) -> list[str]:
    """Return the names of all saves, the newest step first; in a bucket, of those that are committed."""
    names: Iterable[str]
    try:
        if isinstance(directory, RemotePath):
            names = {name.removesuffix(f"/{STATE}") for name, _ in directory.walk() if name.endswith(f"/{STATE}")}
        else:
            names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SaveError(f"{directory} cannot be read: {error}") from error
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return sorted(steps, key=lambda name: (steps[name], name), reverse=True)


def find_save(directory: Path, secret: bytes = b"") -> tuple[Manifest | None, list[str]]:
    """Return what the newest readable save holds, and what was wrong with newer ones."""
    problems: list[str] = []
    try:
        paths = list_saves(directory)
    except SaveError as error:
        return None, [str(error)]
    for path in paths:
        try:
            return check_save(path, secret), problems
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
    num_readable, good = 0, good_save(directory)
    for path in list_saves(directory):
        if num_readable >= keep:
            if path != written and path.name != good:
                shutil.rmtree(path, ignore_errors=True)
                known.pop(path.name, None)
        elif path == written or is_readable(path, secret, known):
            num_readable += 1


def _marks(path: Path) -> Marks:
    found = [(path / name).stat() for name in [STATE, *sorted(set(os.listdir(path)) - {STATE})]]
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


def remove_leftovers(directory: Path, current: Path | None = None) -> None:
    """Remove what killed writers of this machine began; another worker may be writing its own just now.

    A folder that several workers share is left over unless it is ``current`` or of a later step of the same group:
    others may be ahead of this worker.
    """
    for leftover in directory.glob(f"{PARTIAL}*"):
        if SHARED in leftover.name:
            if current is None or _is_before(leftover.name, current.name):
                shutil.rmtree(leftover, ignore_errors=True)
            continue
        host, _, process = leftover.name.removeprefix(PARTIAL).partition("-")[2].rpartition("-")
        if host == socket.gethostname() and not _is_alive(process):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_before(name: str, current: str) -> bool:
    """Return whether a shared folder is of another group than ``current``, or of an earlier step of the same.

    >>> _is_before(".partial-4-shared-1.0", ".partial-5-shared-1.0"), _is_before(
    ...     ".partial-6-shared-1.0", ".partial-5-shared-1.0")
    (True, False)
    """
    (step, _, key), (current_step, _, current_key) = (one.partition(SHARED) for one in (name, current))
    return key != current_key or (len(step), step) < (len(current_step), current_step)


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
