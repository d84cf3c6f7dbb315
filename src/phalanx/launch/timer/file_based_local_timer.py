"""Keeps timers of processes of this machine, asked for through a named pipe: the kind that an agent serves.

Owns the pipe and the format of its lines: one JSON object each, written at once, so that clients never mix. Only this
user can write to it. A line that is none is named in the log and left out. Expired timers kill the worker; torch's
server then kills the process that it runs in as well, ours leaves the agent to its policy.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal as signals
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from phalanx.launch.timer.api import RequestQueue, TimerClient, TimerRequest
from phalanx.launch.timer.local_timer import ProcessTimerServer, kill

log = logging.getLogger(__name__)

SERVER_PATIENCE = 1.0
"""Seconds that a client waits for the server to open the pipe."""

_MAX_LINE = 512
"""Bytes that every system writes to a pipe as a whole (POSIX)."""


@dataclass(init=False)
class FileTimerRequest(TimerRequest):
    """Sets a timer of a process, or takes it back. ``signal`` is what the process gets; 0 or less: nothing."""

    signal: int
    version: int = 1

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def to_json(self) -> str:
        """Return the line."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )

    @staticmethod
    def from_json(line: bytes) -> FileTimerRequest:
        """Return the request of a line; ``ValueError`` when it is none."""
        try:
            found = json.loads(line)
            pid, signal = int(found["pid"]), int(found["signal"])
            request = FileTimerRequest(pid, str(found["scope_id"]), float(found["expiration_time"]), signal)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{line[:80]!r} is no request of a timer") from error
        if pid <= 1:  # to the system, such numbers stand for many processes at once
            raise ValueError(f"{line[:80]!r} names no process")
        return request


class FileTimerClient(TimerClient):
    """Asks for timers of this process through a pipe. ``signal`` is what ends it."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > min(_MAX_LINE, select.PIPE_BUF):
            raise RuntimeError(f"the scope of a timer is too long: {len(line)} bytes; expected {_MAX_LINE} at most")
        until = time.monotonic() + SERVER_PATIENCE
        while True:
            try:
                fd = os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError as error:  # no reader yet, or no pipe
                if time.monotonic() > until:
                    raise BrokenPipeError(f"no timer server reads {self._file_path}: {error}") from error
                time.sleep(0.02)
        try:
            os.set_blocking(fd, True)
            os.write(fd, line)
        finally:
            os.close(fd)


class _Pipe(RequestQueue):
    """Brings requests through a named pipe."""

    def __init__(self, path: str) -> None:
        if os.path.lexists(path):
            if not stat.S_ISFIFO(os.lstat(path).st_mode):
                raise FileExistsError(f"{path} should become the pipe of the timers, but is there and no pipe")
            os.remove(path)  # of a server that was killed
        os.mkfifo(path, 0o600)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._poller = select.poll()  # select.select takes no descriptor above 1023
        self._poller.register(self._fd, select.POLLIN)
        self._writer = os.open(path, os.O_WRONLY)  # kept open: a pipe without writers would always be at its end
        self._rest = b""
        self.path = path

    def size(self) -> int:
        return 64

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        if not self._poller.poll(1000 * timeout):
            return []
        *lines, self._rest = (self._rest + os.read(self._fd, 1 << 16)).split(b"\n")
        self._rest = self._rest[-select.PIPE_BUF :]
        requests: list[TimerRequest] = []
        for line in filter(None, lines):
            try:
                requests.append(FileTimerRequest.from_json(line))
            except ValueError as error:
                log.warning("ignored what was written to the pipe of the timers: %s", error)
        return requests

    def wake(self) -> None:
        """Let ``get`` return."""
        os.write(self._writer, b"\n")

    def close(self) -> None:
        for fd in (self._fd, self._writer):
            os.close(fd)
        with suppress(OSError):
            os.remove(self.path)


class FileTimerServer(ProcessTimerServer):
    """Keeps the timers that ``FileTimerClient`` asks for. ``log_event`` hears of what happens."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._pipe = _Pipe(file_path)
        self.path = file_path
        super().__init__(self._pipe, max_interval, daemon)
        self._run_id = run_id
        self._log_event = log_event or (lambda name, request: None)
        self._last_progress_time = int(time.time())

    def start(self) -> None:
        super().start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        if self._stop_signaled:
            return
        self._stop_signaled = True
        self._pipe.wake()
        super().stop()
        self._pipe.close()
        self._log_event("watchdog stopped", None)

    def get_last_progress_time(self) -> int:
        """Return when the timers were last looked at."""
        return self._last_progress_time

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return whether there is such a process of this user."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def _run_watchdog(self) -> None:
        super()._run_watchdog()
        self._last_progress_time = int(time.time())
        self.clear_timers({pid for pid, _ in self._timers if not self.is_process_running(pid)})

    def _reap_worker(self, worker_id: Any) -> bool:
        expired: list[Any] = self.get_expired_timers(time.time()).get(worker_id, [])
        for request in expired:
            self._log_event("timer expired", request)
            if request.signal > 0:  # told before, so that whoever hears of its end knows why
                self._log_event("kill worker process", request)
                return kill(request.worker_pid, request.signal)
        return True  # nobody is to be killed for it
