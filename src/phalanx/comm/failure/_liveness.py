"""Notices at once that a process on this machine has died.

Owns who a process is (``Identity``, exchanged through the store when a group forms) and one epoll thread per process
that watches the peers' pidfds. It tells; what follows is the transport's business. Death on other machines shows as
a closed connection or, if the machine vanished, as a lost lease; neither is seen here.

A process that is killed ends in two acts: its threads end at once, then the kernel frees its memory (10 ms and more for
one that has imported torch), and only then its pidfd says so. So the end of one of its threads is watched too, its own
watcher thread, which never ends before; that its first thread is on its way out is then looked up.

Guarantees: the callback runs in the watcher thread within milliseconds of the death, once, and never for a process that
could still do something; after ``forget`` it never runs again; a pid that was reused by another process counts as dead.
Assumptions: Linux 5.3 (pidfd), 6.9 to watch threads; before that deaths are told when the memory is freed. Elsewhere
nothing is watched and ``watch_deaths`` says so by returning False.
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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from phalanx.comm import _background as background

log = logging.getLogger(__name__)

_PF_EXITING = 4  # Linux's flag of a process that has begun to exit
_PIDFD_THREAD = os.O_EXCL  # Linux's flag of pidfd_open: of a thread, not of its process

_EXIT_TAKES = 0.1
"""Seconds from the end of a killed process's first thread to that of its last, on a machine with much else to do."""


@dataclass(frozen=True)
class Identity:
    """A process, told apart from every other one on any machine and from later ones with the same pid."""

    machine: str
    """Boot id and pid namespace: equal where pids mean the same process."""
    host: str
    pid: int
    started: int
    uid: int
    thread: int = field(default=0, compare=False)
    """A thread of it that ends only with it; 0: none is known."""

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
    """Return who this process is; from now on it has a watcher thread, by whose end others notice its own."""
    return Identity(
        machine=_machine(),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_proc_stat(os.getpid())[1],
        uid=os.getuid(),
        thread=_own_watcher().thread if _can_watch() else 0,
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
        self._threads: dict[Identity, int] = {}
        """By process, the pidfd of one of its threads."""
        runs = background.start(
            self._run, "phalanx-peer-watch", on_failure=lambda error: None, attempts=background.FOREVER
        )
        self.thread = runs.native_id

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
                self._add_thread(identity)
            self._callbacks[fd].append(callback)
            return True

    def _add_thread(self, identity: Identity) -> None:
        if not os.path.exists(f"/proc/{identity.pid}/task/{identity.thread}"):
            return
        try:
            fd = os.pidfd_open(identity.thread, _PIDFD_THREAD)
        except OSError:
            return  # an older kernel: the process's own end is noticed, a moment later
        self._threads[identity], self._identities[fd] = fd, identity
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def remove(self, identity: Identity, callback: Callable[[Identity], None]) -> None:
        with self._lock:
            fd = self._fds.get(identity)
            if fd is None or callback not in self._callbacks[fd]:
                return
            self._callbacks[fd].remove(callback)
            if not self._callbacks[fd]:
                self._drop(fd)

    def _drop(self, fd: int) -> None:
        identity = self._identities[fd]
        del self._fds[identity], self._callbacks[fd]
        self._close(fd)
        self._drop_thread(identity)

    def _drop_thread(self, identity: Identity) -> None:
        fd = self._threads.pop(identity, None)
        if fd is not None:
            self._close(fd)

    def _close(self, fd: int) -> None:
        del self._identities[fd]
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
            of_thread = identity is not None and self._threads.get(identity) == fd
        if of_thread and identity is not None and not _is_on_its_way_out(identity):
            with self._lock:  # that thread alone has ended
                if self._threads.get(identity) == fd:
                    self._drop_thread(identity)
            return
        with self._lock:
            if identity is None or identity not in self._fds or identity.is_alive():
                return
            fd = self._fds[identity]
            callbacks = self._callbacks[fd]
            self._drop(fd)
        for callback in callbacks:
            try:
                callback(identity)
            except Exception:  # one group's trouble must not keep the others from hearing of a death
                log.exception("what follows the death of process %d failed", identity.pid)


def _is_on_its_way_out(identity: Identity) -> bool:
    """Return whether a process of which a thread has ended ends altogether; its threads end one after the other."""
    until, pause = time.monotonic() + _EXIT_TAKES, 0.0001
    while identity.is_alive():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.002)
    return True


_watcher: _Watcher | None = None
_watcher_lock = threading.Lock()


def _can_watch() -> bool:
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open")


def _own_watcher() -> _Watcher:
    global _watcher
    with _watcher_lock:
        if _watcher is None or _watcher.pid != os.getpid():  # a forked child has no watcher thread
            _watcher = _Watcher()
        return _watcher


def watch_deaths(identity: Identity, callback: Callable[[Identity], None]) -> bool:
    """Call ``callback(identity)`` when that process of this machine dies; False if it cannot be watched.

    When the process is dead already the callback runs before the call returns.
    """
    if not _can_watch() or identity.machine != _machine():
        return False
    if not _own_watcher().add(identity, callback):
        callback(identity)
    return True


def forget_deaths(identity: Identity, callback: Callable[[Identity], None]) -> None:
    watcher = _watcher
    if watcher is not None and watcher.pid == os.getpid():
        watcher.remove(identity, callback)
