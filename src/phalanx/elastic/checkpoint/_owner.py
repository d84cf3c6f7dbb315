"""Finds out whether another job writes to a directory, by a lock on the file ``owner`` in it.

All processes of a job share the lock, so workers come and go as they like; the file says which job it is. The kernel
lets go of it when the last of them ends, however that happens: then the next job takes over at once, without a word.

Assumptions: who has a lock lives. A process of a job that was killed may live on for a moment (and so may the loader
processes that it has forked), so another's lock is looked at for ``PATIENCE`` before it counts. Where locks do not work
(some network file systems), or nobody may write, nothing is known and nothing is said.

Rejected: to refuse the directory. A file server may hold the lock of a machine that has crashed for minutes, and the
job that was started in its place has every right to go on.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx.events._event_types import DirectoryShared
from phalanx.events._troubles import say
from phalanx.events._writer import EventLog
from phalanx.protocol import ENV_JOB
from phalanx.world import World

OWNER = "owner"
PATIENCE = 2.0
"""Seconds for which another's lock is taken for one that is about to go."""

_PAUSE = 0.05
_LONGEST = 500
"""Characters of the file that are read: anybody may have written it."""


def identity_of_job(environ: Mapping[str, str], *, has_group: bool) -> str:
    """Return what tells this job from others: equal in all its processes. Empty: nothing is known that does.

    ``has_group``: others have started the workers, and made their group.

    >>> identity_of_job({"PHALANX_JOB": "a1"}, has_group=False), identity_of_job({}, has_group=True)
    ('job a1', '')
    """
    if environ.get(ENV_JOB):
        return f"job {environ[ENV_JOB]}"
    is_alone = not has_group and World.from_env(environ).size == 1
    return f"process {os.getpid()} on {socket.gethostname()}" if is_alone else ""


class DirectoryOwner:
    """The claim of one process to a directory, for its job."""

    def __init__(
        self,
        directory: Path,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory, self._identity = directory, identity
        self._clock, self._sleep = clock, sleep
        self._release: weakref.finalize[[int], DirectoryOwner] | None = None
        self._is_known = False
        """Whether another job was found and told of: it is not waited for again."""

    def claim(self) -> str:
        """Take part in the claim; returns the other job that has the directory, once, else an empty text.

        Where the directory does not exist there is nothing to claim yet.
        """
        if self._release is not None or not self._identity or not self._directory.is_dir():
            return ""
        give_up = self._clock() + (0.0 if self._is_known else PATIENCE)
        try:
            while other := self._try():
                if self._clock() >= give_up:
                    is_new, self._is_known = not self._is_known, True
                    return other if is_new else ""
                self._sleep(_PAUSE)
        except OSError:
            return ""
        self._is_known = False
        return ""

    def tell(self, what: str, consequence: str, events: EventLog) -> None:
        """Take part in the claim; if another job has it, say so and write it down."""
        if other := self.claim():
            events.write(DirectoryShared(directory=str(self._directory), owner=other))
            say(
                f"the {what} in {self._directory} are those of {other}, which is still running: {consequence}. Give "
                "each job a directory of its own; training goes on"
            )

    def release(self) -> None:
        """Let go of it."""
        if self._release is not None:
            self._release()
            self._release = None

    def _try(self) -> str:
        """Return who else has it; empty: it is claimed now."""
        fd = os.open(self._directory / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _lock(fd, fcntl.LOCK_EX):  # nobody has it: whoever is named in it is gone
                text = self._identity.encode()
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))
            told = "" if _lock(fd, fcntl.LOCK_SH) else "a job that has just come"
            told = told or _other(fd, self._identity)
        except BaseException:
            os.close(fd)
            raise
        if told:
            os.close(fd)
        else:
            self._release = weakref.finalize(self, os.close, fd)
        return told


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _other(fd: int, identity: str) -> str:
    text = os.pread(fd, _LONGEST, 0).decode(errors="replace")
    return "" if text == identity else "".join(c for c in text if c.isprintable()) or "a job without a name"
