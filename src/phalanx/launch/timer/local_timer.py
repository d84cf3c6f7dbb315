"""Keeps timers of processes of this machine, asked for through a ``multiprocessing`` queue; kills by process id."""

from __future__ import annotations

import logging
import os
import signal
import time
from queue import Empty
from typing import Any

from phalanx.launch.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer

log = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """Asks for timers of this process through a queue of its parent's."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Brings requests through a ``multiprocessing`` queue."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        requests: list[TimerRequest] = []
        until = time.monotonic() + timeout
        try:
            while len(requests) < size:
                requests.append(self._mp_queue.get(timeout=max(0.0, until - time.monotonic())))
        except Empty:
            pass
        return requests


class ProcessTimerServer(TimerServer):
    """Keeps the timers of processes by their ids, and looks at them when the first is due."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__(request_queue, max_interval, daemon)
        self._timers: dict[tuple[Any, str], TimerRequest] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for key in [key for key in self._timers if key[0] in worker_ids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        found: dict[Any, list[TimerRequest]] = {}
        for request in sorted(self._timers.values(), key=lambda request: request.expiration_time):
            if request.expiration_time <= deadline:
                found.setdefault(request.worker_id, []).append(request)
        return found

    def _patience(self) -> float:
        due = min((request.expiration_time for request in self._timers.values()), default=float("inf"))
        return max(0.0, min(self._max_interval, due - time.time()))

    def _reap_worker(self, worker_id: Any) -> bool:
        return kill(int(worker_id), signal.SIGKILL)


class LocalTimerServer(ProcessTimerServer):
    """Keeps the timers that ``LocalTimerClient`` asks for."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)


def kill(pid: int, signum: int) -> bool:
    """Send a signal; True when the process has got it or is gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return True
    except OSError as error:
        log.error("process %d, whose timer has expired, cannot be signalled: %s", pid, error)
        return False
    return True
