"""Makes folders that belong to one agent: gone with it, at the latest when the next agent starts.

Owns the mark of ownership and the register of running jobs. An agent that is killed cannot clean up. So every folder
holds a file on which its owner keeps a lock, which the kernel lets go of whatever way the owner ends; the next agent of
the same user removes folders whose lock it can take. A lock, not a pid: pids are used again, and other containers that
share the file system have pids of their own.

``<temporary>/phalanx-<uid>/agent_*`` are the folders of agents: the workers' multiprocessing keeps its sockets there,
and ``job.json`` says which job it is, so that ``phalanx scale`` finds it without being told.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass

_OWNER = ".owner"
_JOB = "job.json"
_AGENT = "agent_"
TEMPORARY_LOGS = "phalanx_"
"""How the log directories begin that nobody asked for."""


class OwnedFolder:
    """Makes a new folder that this process owns until ``keep``, ``remove``, or its end."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        self._lock = create_locked(os.path.join(self.path, _OWNER))

    def keep(self) -> None:
        """Leave the folder to whoever wants to look into it."""
        try:
            os.unlink(os.path.join(self.path, _OWNER))
        except OSError:
            pass
        self._let_go()

    def remove(self) -> None:
        """Remove the folder and all that is in it. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """Names a job that an agent of this user and this machine takes part in."""

    run_id: str
    store_url: str
    secret_file: str = ""
    log_dir: str = ""
    """Where the agent of this machine writes events and logs, if the user asked for them."""


def open_agent_folder() -> OwnedFolder:
    """Make this agent's own folder; where the user's register cannot be trusted, one that nobody will find."""
    root = _register()
    return OwnedFolder(_AGENT, root) if root else OwnedFolder("phalanx-agent_")


def register_job(folder: OwnedFolder, job: RunningJob) -> None:
    """Let ``running_jobs`` find the job as long as the folder's owner lives."""
    new = os.path.join(folder.path, f"{_JOB}.new")
    with open(new, "w", encoding="utf-8") as file:
        json.dump(asdict(job), file)
    os.rename(new, os.path.join(folder.path, _JOB))


def running_jobs() -> list[RunningJob]:
    """Return the jobs of this user on this machine, each once."""
    root = _register(make=False)
    found: list[RunningJob] = []
    for path in _folders(root, _AGENT) if root else ():
        if not _is_owned(path):
            continue
        try:
            with open(os.path.join(path, _JOB), encoding="utf-8") as file:
                job = RunningJob(**{key: str(value) for key, value in json.load(file).items()})
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # it has just begun, or is of another release
        if job not in found:
            found.append(job)
    return found


def sweep() -> list[str]:
    """Remove what killed agents of this user left behind; the paths."""
    root, removed = _register(make=False), []
    abandoned = [*(_folders(root, _AGENT) if root else ()), *_folders(tempfile.gettempdir(), TEMPORARY_LOGS)]
    for path in abandoned:
        if os.path.exists(os.path.join(path, _OWNER)) and not _is_owned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _folders(parent: str, prefix: str) -> list[str]:
    """Return this user's folders there: no links, nobody else's."""
    try:
        entries = [entry for entry in os.scandir(parent) if entry.name.startswith(prefix)]
        return [
            entry.path
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        ]
    except OSError:
        return []


def _is_owned(path: str) -> bool:
    """Return whether its owner lives. A folder that is just being removed counts as owned: it is not ours to touch."""
    return is_locked(os.path.join(path, _OWNER))


def is_locked(path: str) -> bool:
    """Return whether a process that made a file with ``create_locked`` lives; True as well where there is no file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def create_locked(path: str, content: bytes = b"") -> int:
    """Make a file, in the place of one that is there, locked before anybody can find it; the lock is the returned
    descriptor's."""
    new = f"{path}.new"
    fd = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.rename(new, path)
    except OSError:
        os.close(fd)
        os.unlink(new)
        raise
    return fd


def _register(*, make: bool = True) -> str:
    """Return the folder in which this user's agents have theirs; "" when there is none or others can write to it."""
    path = os.path.join(tempfile.gettempdir(), f"phalanx-{os.getuid()}")
    try:
        if make:
            os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError:
        return ""
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return path if is_ours else ""
