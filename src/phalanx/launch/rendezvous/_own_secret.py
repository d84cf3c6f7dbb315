"""Makes the secret of a job on one node that nobody gave one; the agent that serves the store does.

Owns the file that hands it to workers and to ``phalanx scale`` of the same user: one under ``/tmp/phalanx-UID``, with
modes that keep everybody else out, gone with the job. The place does not depend on ``TMPDIR``, which may differ between
the shell that runs a job and the one that scales it. The agent writes the file again when something has tidied it away:
a worker that replaces another days later needs it too. It is locked for as long as the agent lives, and whoever finds
one without a lock removes it: by pid, agents in another container with the same ``/tmp`` would seem dead.

Rejected: a secret for jobs on stores that outlive their agents (file, etcd): the same job, begun again elsewhere, could
not read its own records.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path
from urllib.parse import quote

from phalanx.launch.system._folders import create_locked, is_locked

_SUFFIX = ".secret"


class OwnSecret:
    """A new secret, and the file that it is kept in until ``remove``."""

    def __init__(self, job: str) -> None:
        self.value = secrets.token_hex(32).encode()
        self._path = _folder() / f"{_name(job)}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}"
        self._lock = create_locked(str(self._path), self.value)

    def keep(self) -> str:
        """Return the path of the file, which is there."""
        if not self._path.exists():
            self._let_go()
            self._path = _folder() / self._path.name
            self._lock = create_locked(str(self._path), self.value)
        return str(self._path)

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._let_go()
        try:
            self._path.parent.rmdir()
        except OSError:
            pass  # other jobs of this user have theirs there


def known_secrets(job: str) -> list[bytes]:
    """Return the secrets of this user's running jobs of that name on this machine; files that dead agents left are
    removed."""
    folder = _shared_folder()
    if not _is_private(folder):
        return []
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        if not is_locked(str(path)):
            path.unlink(missing_ok=True)
        elif path.name.removesuffix(_SUFFIX).rsplit(".", 2)[0] == _name(job):
            try:
                found.append(path.read_bytes())
            except OSError:
                continue  # its job ended just now
    return found


def _name(job: str) -> str:
    return quote(job, safe="")[:200]


def _shared_folder() -> Path:
    base = Path("/tmp") if os.path.isdir("/tmp") else Path(tempfile.gettempdir())
    return base / f"phalanx-{os.getuid()}"


def _folder() -> Path:
    """Find a folder that nobody else can read: the shared one of this user, or a new one if somebody else has its
    name."""
    folder = _shared_folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        pass  # /tmp may not be ours to write to
    return folder if _is_private(folder) else Path(tempfile.mkdtemp(prefix="phalanx-"))


def _is_private(folder: Path) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
