"""Runs calls one after the other: in the caller while nothing is queued, else in one background thread.

Owns the order only. It is what lets transports that are made of blocking calls offer asynchronous ones: every rank runs
the same calls in the same order.

A call may have continuations (``QueuedCall.run`` of a subclass runs them), and these may make calls themselves. Such a
call is made at once, inside: it comes right after the call that it continues and before whatever was queued meanwhile,
on every rank, however early or late the others queue. A continuation that waits for a call that is still queued makes
the calls up to it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from phalanx.comm._background import FOREVER, Background
from phalanx.comm.transports._interface import Work
from phalanx.errors import PeerTimeout


class QueuedCall(Work):
    """A call that is queued or done. ``error`` is what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.calls: OrderedCalls | None = None
        """Where it is queued."""
        self._call: Callable[[], object] | None = call
        self._over = threading.Event()

    def run(self) -> None:
        assert self._call is not None, "a call is made once"
        try:
            self._call()
        except BaseException as error:  # the caller of wait() gets it
            self.error = error
        self._call = None  # frees its tensors
        self._over.set()

    def wait(self, timeout: float | None = None) -> None:
        if self.calls is not None and not self._over.is_set():
            self.calls.help(self, timeout)
        if not self._over.wait(timeout):
            raise PeerTimeout(f"a queued collective is not done after {timeout:g} s; waiting again is allowed")
        if self.error is not None:
            raise self.error.with_traceback(None)

    def is_done(self) -> bool:
        return self._over.is_set()


class OrderedCalls:
    """The queue of one transport; its thread starts with the first asynchronous call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[QueuedCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued = 0
        self._thread: Background | None = None
        self._is_stopped = False

    def run(self, call: Callable[[], object]) -> None:
        """Make a call after all that were queued before, and wait for it."""
        if self._num_queued and not self._is_serving():
            self.submit(QueuedCall(call)).wait()
        else:
            call()

    def submit(self, queued: QueuedCall) -> QueuedCall:
        if self._is_serving():
            queued.run()
            return queued
        with self._lock:
            if not self._is_stopped:
                queued.calls = self
                self._num_queued += 1
                self._queue.put(queued)
                if self._thread is None:
                    self._thread = Background(self._serve, self._name, on_failure=lambda error: None, attempts=FOREVER)
                    self._thread.start()
                return queued
        queued.run()  # nobody else would
        return queued

    def help(self, queued: QueuedCall, timeout: float | None) -> None:
        """In a continuation, make the queued calls up to this one: nobody else would. Elsewhere nothing."""
        if not self._is_serving():
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while not queued.is_done() and (deadline is None or time.monotonic() < deadline):
            if not self._serve_next():
                self.stop()  # it was for the thread's own loop
                return

    def _is_serving(self) -> bool:
        return self._thread is not None and self._thread.is_current

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Wait for a call and make it; False when there is an end to them."""
        queued = self._queue.get()
        if queued is None:
            return False
        queued.run()
        with self._lock:
            self._num_queued -= 1
        return True

    def stop(self) -> None:
        """End the thread after what is queued; what comes later is made in the caller."""
        with self._lock:
            self._is_stopped = True
            self._queue.put(None)
