"""Defines timers and the roles around them: clients in workers ask, a server beside them kills who overstays.

Owns the interfaces, the server's loop and ``expires``. What an expired timer means is the server's to say: a kind of
its own derives from ``TimerServer``. A request that makes no sense, or a server that fails, never ends the loop.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass
class TimerRequest:
    """Sets a timer of a worker, or takes it back (a negative ``expiration_time``)."""

    worker_id: Any
    scope_id: str
    expiration_time: float
    """In seconds since 1970."""


class TimerClient(ABC):
    """Asks for timers, in a worker."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set the timer of this worker for a scope."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Take the timer of a scope back."""


class RequestQueue(ABC):
    """Brings requests to a server."""

    @abstractmethod
    def size(self) -> int:
        """Return how many requests ``get`` would return now."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to ``size`` requests; fewer, maybe none, after ``timeout`` seconds."""


class TimerServer(ABC):
    """Keeps timers, in a thread, and deals with workers that overstay."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        """``max_interval``: seconds between two looks at the timers, at most."""
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take requests: new timers, and those that are taken back."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget the timers of workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Return, by worker, the timers that are over at ``deadline``."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Kill a worker; False when that has to be tried again. One that raises counts as done."""

    def _patience(self) -> float:
        """Return how many seconds to wait for requests before the timers are looked at again."""
        return self._max_interval

    def start(self) -> None:
        """Begin. Starts a thread."""
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="phalanx-timers", daemon=self._daemon)
        self._watchdog_thread.start()

    def stop(self) -> None:
        """End; workers whose timers run are left alone."""
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval)
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                log.exception("timers could not be looked at; the next look is in %g s", self._max_interval)
                time.sleep(self._max_interval)  # whatever failed must not be tried as fast as possible

    def _run_watchdog(self) -> None:
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), self._patience()))
        done = set()
        for worker_id, timers in self.get_expired_timers(time.time()).items():
            scopes = ", ".join(timer.scope_id for timer in timers)
            log.warning("worker %s overstays in %s: its timer has expired", worker_id, scopes)
            try:
                if self._reap_worker(worker_id):
                    done.add(worker_id)
            except Exception:
                log.exception("worker %s, whose timer has expired, could not be killed", worker_id)
                done.add(worker_id)
        self.clear_timers(done)


_client: list[TimerClient] = []
"""The client of this process, if it has one: what torch's module-level functions act on has to live somewhere."""


def configure(timer_client: TimerClient) -> None:
    """Set the client that ``expires`` uses in this process."""
    _client[:] = [timer_client]


@contextmanager
def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> Iterator[None]:
    """Let this worker be killed if the block takes longer than ``after`` seconds.

    ``scope`` names the block in the log: by default, its file and line. ``RuntimeError`` without a client.
    """
    if client is None and not _client:
        raise RuntimeError("expires() has no client: call configure(...) first, or give it one")
    client = client or _client[0]
    if scope is None:
        caller = sys._getframe(2)  # 1 is contextlib's
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)
