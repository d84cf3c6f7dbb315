"""Notices at once that a process on this machine has died.

Owns who a process is (``Identity``, exchanged through the store when a group forms) and one epoll thread per process
that watches the peers' pidfds. It tells; what follows is the transport's business. Death on other machines shows as
a closed connection or, if the machine vanished, as a lost lease; neither is seen here.

Guarantees: the callback runs in the watcher thread within milliseconds of the death, once; after ``forget`` it never
runs again; a pid that was reused by another process counts as dead.
Assumptions: Linux 5.3 (pidfd). Elsewhere nothing is watched and ``watch_deaths`` says so by returning False.
Rejected: a thread per group (a mesh has many groups), SIGCHLD (peers are not children), polling ``kill(pid, 0)``
(takes a zombie for alive).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from phalanx.comm import _background as background

log = logging.getLogger(__name__)

_PF_EXITING = 4  # Linux's flag of a process that has begun to exit


@dataclass(frozen=True)
class Identity:
    """A process, told apart from every other one on any machine and from later ones with the same pid."""

    machine: str
    """Boot id and pid namespace: equal where pids mean the same process."""
    host: str
    pid: int
    started: int
    uid: int

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    def is_alive(self) -> bool:
        """Return whether the process runs (one on its way out does not, nor a zombie). Only meaningful on its own
        machine.

        A process marks itself as exiting before its connections are closed, so who sees one close sees why.
        """
        state, started = _proc_stat(self.pid)
        return state not in ("", "Z", "X") and started == self.started

    def is_stopped(self) -> bool:
        return _proc_stat(self.pid)[0] in ("T", "t")


def own_identity() -> Identity:
    return Identity(
        machine=_machine(),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_proc_stat(os.getpid())[1],
        uid=os.getuid(),
    )


@lru_cache(maxsize=1)
def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _proc_stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; ("", 0) when there is none, or no /proc. "X": it is exiting or gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        exiting = int(fields[6]) & _PF_EXITING
        return "X" if exiting else fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


class _Watcher:
    """The epoll thread of one process; see ``watch_deaths``."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._fds: dict[Identity, int] = {}
        self._callbacks: dict[int, list[Callable[[Identity], None]]] = {}
        self._identities: dict[int, Identity] = {}
        background.start(self._run, "phalanx-peer-watch", on_failure=lambda error: None, attempts=background.FOREVER)

    def add(self, identity: Identity, callback: Callable[[Identity], None]) -> bool:
        """False when the process is dead already."""
        with self._lock:
            fd = self._fds.get(identity)
            if fd is None:
                try:
                    fd = os.pidfd_open(identity.pid)
                except OSError:
                    return False
                if not identity.is_alive():
                    os.close(fd)
                    return False
                self._fds[identity], self._identities[fd], self._callbacks[fd] = fd, identity, []
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._callbacks[fd].append(callback)
            return True

    def remove(self, identity: Identity, callback: Callable[[Identity], None]) -> None:
        with self._lock:
            fd = self._fds.get(identity)
            if fd is None or callback not in self._callbacks[fd]:
                return
            self._callbacks[fd].remove(callback)
            if not self._callbacks[fd]:
                self._drop(fd)

    def _drop(self, fd: int) -> None:
        del self._fds[self._identities.pop(fd)], self._callbacks[fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        os.close(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                self._tell(fd)

    def _tell(self, fd: int) -> None:
        """What the epoll said of ``fd`` may be old: forgotten since, and the number another process's by now."""
        with self._lock:
            identity = self._identities.get(fd)
            if identity is None or identity.is_alive():
                return
            callbacks = self._callbacks[fd]
            self._drop(fd)
        for callback in callbacks:
            try:
                callback(identity)
            except Exception:  # one group's trouble must not keep the others from hearing of a death
                log.exception("what follows the death of process %d failed", identity.pid)


_watcher: _Watcher | None = None
_watcher_lock = threading.Lock()


def watch_deaths(identity: Identity, callback: Callable[[Identity], None]) -> bool:
    """Call ``callback(identity)`` when that process of this machine dies; False if it cannot be watched.

    When the process is dead already the callback runs before the call returns.
    """
    global _watcher
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open") or identity.machine != _machine():
        return False
    with _watcher_lock:
        if _watcher is None or _watcher.pid != os.getpid():  # a forked child has no watcher thread
            _watcher = _Watcher()
        watcher = _watcher
    if not watcher.add(identity, callback):
        callback(identity)
    return True


def forget_deaths(identity: Identity, callback: Callable[[Identity], None]) -> None:
    watcher = _watcher
    if watcher is not None and watcher.pid == os.getpid():
        watcher.remove(identity, callback)
