"""Talks to a zygote from the agent's side: parks processes, gives them orders, hears of their ends.

Owns ``Zygote`` and ``WorkerProcess`` (one per process). All ends are reported to one callback, from one reader thread,
in the order in which they happened. Of a zygote that dies the workers live on as children of the agent, which adopts
orphans (``_linux.adopt_orphans``): their ends are reported by threads of their own, their process groups killed before
they are reaped; those that were parked are let go. On systems that know no orphans its workers are killed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from phalanx.comm._background import Background, start
from phalanx.errors import PhalanxError
from phalanx.launch.system import _linux
from phalanx.launch.workers._after_fork import prepare_fork
from phalanx.launch.workers._messages import receive_message, send_message
from phalanx.launch.workers._script import interpreter_command

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for a zygote to import what it should preload, and for a fork (machines do stall)."""

CLOSE_TIMEOUT = 30.0
"""Seconds for a zygote to kill its workers and end; it takes itself five at most."""


class ProcessStartError(PhalanxError, RuntimeError):
    """No process could be started, or what should be preloaded cannot be imported."""


class WorkerProcess:
    """Stands for a process that the zygote forked: parked until ``order``, then a worker."""

    def __init__(self, pid: int, orders: socket.socket, lifeline: socket.socket) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self.ended_at = 0.0
        """When the zygote saw its end: the agent may be busy and hear of several ends at once."""
        self.is_parked = True
        self._orders = orders
        self._lifeline = lifeline
        """Kept open while it lives: the kernel kills it when this end is closed."""

    def order(self, order: Mapping[str, Any], fds: Mapping[str, int]) -> None:
        """Let the parked process become a worker. A process that died meanwhile is reported by its exit alone."""
        assert self.is_parked, f"process {self.pid} has its order already"
        self.is_parked = False
        with self._orders, suppress(OSError):
            send_message(self._orders, {**order, "fds": list(fds)}, list(fds.values()))

    @property
    def waits(self) -> bool:
        """Whether an order would reach it."""
        return self.is_parked and self.exit_code is None

    def discard(self) -> None:
        """Let a parked process end: it was not needed."""
        if self.is_parked:
            self.is_parked = False
            self.let_go()

    def end(self, exit_code: int) -> None:
        """Note that it has ended."""
        self.exit_code = exit_code
        self.let_go()

    def let_go(self) -> None:
        """Close the connections to it: whatever is left of it is killed."""
        _close_all((self._orders, self._lifeline))

    def send_signal(self, signum: int, *, to_group: bool = True) -> None:
        """Signal the worker's process group, or it alone; nothing happens when it is gone."""
        if self.exit_code is not None:
            return  # reaped: the number may belong to somebody else
        try:
            os.killpg(self.pid, signum) if to_group else os.kill(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            pass


class Zygote:
    """Stands for a running zygote. ``on_exit(process)`` is called once per process, mostly in the reader thread."""

    def __init__(self, sock: socket.socket, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self._sock = sock
        self._child = child
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._forks: dict[str, tuple[Future[WorkerProcess], tuple[socket.socket, socket.socket]]] = {}
        self._processes: dict[int, WorkerProcess] = {}
        self._ready: Future[None] = Future()
        self._on_exit: Callable[[WorkerProcess], None] = lambda process: None
        self._on_gone: Callable[[Zygote], None] = lambda zygote: None
        self._orphans: list[tuple[WorkerProcess, Background]] = []
        self._count = 0
        self.is_gone = False
        """Whether it has ended."""
        self.is_idle = False
        """Whether it has imported all that it wants to and only waits for orders."""
        self._is_closed = False
        self._is_reaped = False
        self._reader = Background(
            self._read, "phalanx-zygote-reader", on_failure=lambda error: self._gone(), attempts=1
        )

    @classmethod
    def fork(cls, functions: Mapping[str, Any] | None = None, preload: Sequence[str] = ()) -> Zygote:
        """Fork this process. Call it before any thread exists; what is imported now is there in every worker."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if functions:
            prepare_fork()
        with warnings.catch_warnings():  # a session's own threads are its business; ours do not exist yet
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            from phalanx.launch.workers._zygote import serve  # start-up: only forks need it

            try:
                ours.close()
                serve(theirs, dict(functions or {}), tuple(preload), parent)
            finally:
                os._exit(1)
        theirs.close()
        return cls(ours, pid, None)

    @classmethod
    def execute(cls, preload: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Zygote:
        """Start one in a fresh interpreter: for callers that have threads already."""
        ours, theirs = socket.socketpair()
        command = interpreter_command(["-m", "phalanx.launch.workers._zygote", str(theirs.fileno()), str(os.getpid())])
        child = subprocess.Popen(
            [*command, *preload], pass_fds=[theirs.fileno()], env=None if env is None else dict(env)
        )
        theirs.close()
        return cls(ours, child.pid, child)

    def start(
        self,
        on_exit: Callable[[WorkerProcess], None],
        on_gone: Callable[[Zygote], None] = lambda zygote: None,
    ) -> None:
        """Begin to listen. Starts a thread: from here on this process should not fork. ``on_gone``: it was killed."""
        self._on_exit, self._on_gone = on_exit, on_gone
        self._reader.start()

    @property
    def is_ready(self) -> bool:
        """Whether everything is preloaded, and it lives."""
        return self._ready.done() and self._ready.exception() is None and not self.is_gone

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Block until everything is preloaded. ``ProcessStartError`` says what could not be imported."""
        try:
            self._ready.result(timeout)
        except FutureTimeoutError:
            raise ProcessStartError(f"the zygote (pid {self.pid}) was not ready after {timeout:g} s") from None

    def park(self, timeout: float = START_TIMEOUT) -> WorkerProcess:
        """Fork a new process that waits for its order."""
        orders, lifeline = socket.socketpair(), socket.socketpair()
        future: Future[WorkerProcess] = Future()
        with self._lock:
            token = str(self._count)
            self._count += 1
            self._forks[token] = (future, (orders[0], lifeline[0]))
            is_gone = self.is_gone
        try:
            if is_gone:
                raise ProcessStartError(f"the zygote (pid {self.pid}) is gone; no worker can be started")
            with self._send_lock:
                send_message(self._sock, {"kind": "fork", "token": token}, [orders[1].fileno(), lifeline[1].fileno()])
            return future.result(timeout)
        except FutureTimeoutError:
            raise ProcessStartError(f"the zygote (pid {self.pid}) did not fork within {timeout:g} s") from None
        except OSError as error:
            raise ProcessStartError(f"the zygote (pid {self.pid}) is gone: {error}") from error
        finally:
            _close_all((orders[1], lifeline[1]))

    def close(self) -> None:
        """Kill every process that is left, end the zygote and reap it. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._send_lock:
            try:
                send_message(self._sock, {"kind": "end"})
            except OSError:
                pass
        if not self._ready.done() and not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)  # it still imports, which may take long, and has no worker yet
        if self._reader.is_alive() and not self._reader.is_current:
            self._reader.join(timeout=CLOSE_TIMEOUT)
        for process, _ in self._orphans:
            process.send_signal(signal.SIGKILL)
        for _, thread in self._orphans:
            thread.join(timeout=CLOSE_TIMEOUT)
        self._sock.close()
        if not self._reap(CLOSE_TIMEOUT):
            # Its workers are in uninterruptible sleep: it must not keep us, and dies with the machine's cure for them.
            os.kill(self.pid, signal.SIGKILL)
            self._reap(CLOSE_TIMEOUT)

    def _reap(self, timeout: float) -> bool:
        if self._is_reaped:
            return True
        self._is_reaped = self._wait_reaped(timeout)
        return self._is_reaped

    def _wait_reaped(self, timeout: float) -> bool:
        if self._child is not None:
            try:
                self._child.wait(timeout)
            except subprocess.TimeoutExpired:
                return False
            return True
        pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        try:
            if pidfd >= 0:
                poller = select.poll()  # select.select takes no descriptor above 1023
                poller.register(pidfd, select.POLLIN)
                if not poller.poll(1000 * timeout):
                    return False
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        return True

    def _read(self) -> None:
        try:
            while (received := receive_message(self._sock)) is not None:
                self._handle(received[0])
        except OSError:
            pass
        self._gone()

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            if message["error"]:
                self._ready.set_exception(ProcessStartError(message["error"]))
            else:
                self._ready.set_result(None)
        elif kind == "idle":
            self.is_idle = True
        elif kind == "forked":
            with self._lock:
                future, ends = self._forks.pop(message["token"])
                process = WorkerProcess(message["pid"], *ends)
                self._processes[process.pid] = process
            future.set_result(process)
        elif kind == "fork_failed":
            with self._lock:
                future, ends = self._forks.pop(message["token"])
            _close_all(ends)
            future.set_exception(ProcessStartError(f"fork failed: {message['error']}"))
        elif kind == "exited":
            with self._lock:
                process = self._processes.pop(message["pid"])
            process.ended_at = message["time"]
            process.end(message["code"])
            self._on_exit(process)

    def _gone(self) -> None:
        if not self._is_closed:
            self._reap(CLOSE_TIMEOUT)  # its socket is closed before its children are given away
        with self._lock:
            self.is_gone, self.is_idle = True, False
            forks, self._forks = self._forks, {}
            processes, self._processes = self._processes, {}
        if not self._ready.done():
            self._ready.set_exception(ProcessStartError(f"the zygote (pid {self.pid}) died while starting"))
        for future, ends in forks.values():
            _close_all(ends)
            future.set_exception(ProcessStartError(f"the zygote (pid {self.pid}) is gone"))
        for process in processes.values():
            process.discard()
            if self._is_closed or not _linux.IS_LINUX:
                _linux.signal_group(process.pid, signal.SIGKILL)
            if _linux.IS_LINUX:
                self._orphans.append((process, _adopt(process, self._on_exit)))
            else:
                process.ended_at = time.time()
                process.end(-signal.SIGKILL)
                self._on_exit(process)
        if not self._is_closed:
            self._on_gone(self)


def _close_all(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        end.close()


def _adopt(process: WorkerProcess, on_exit: Callable[[WorkerProcess], None]) -> Background:
    """Report the end of an orphan when it comes; the thread that does."""

    def failed(error: BaseException) -> None:
        log.error("the end of worker process %d cannot be waited for, so it is killed: %r", process.pid, error)
        _linux.signal_group(process.pid, signal.SIGKILL)
        process.ended_at = time.time()
        process.end(-signal.SIGKILL)
        on_exit(process)

    return start(lambda: _wait_for_orphan(process, on_exit), f"phalanx-orphan-{process.pid}", on_failure=failed)


def _wait_for_orphan(process: WorkerProcess, on_exit: Callable[[WorkerProcess], None]) -> None:
    pid = process.pid
    try:
        # The zombie is left for a moment: as long as it is there, its pid names its group and no other.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # never ours: its zygote had reaped it, or another process adopts orphans
        found = None
    _linux.signal_group(pid, signal.SIGKILL)
    process.ended_at = time.time()
    if found is None:
        process.end(-signal.SIGKILL)
    else:
        process.end(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
        os.waitpid(pid, 0)
    on_exit(process)
