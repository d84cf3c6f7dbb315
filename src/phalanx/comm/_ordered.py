"""Calls that run one after the other: in the caller while nothing is queued, else in one background thread.

Owns the order only. It is what lets transports that are made of blocking calls offer asynchronous ones: every rank runs
the same calls in the same order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from phalanx.comm._background import FOREVER, Background
from phalanx.comm._transport import Work
from phalanx.errors import PeerTimeout


class QueuedCall(Work):
    """A call that is queued or done. ``error`` is what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
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
        if not self._over.wait(timeout):
            raise PeerTimeout(
                f"a queued collective is not done after {timeout:g} s; waiting again is allowed"
            )
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

    def run(self, call: Callable[[], object]) -> None:
        """Make a call after all that were queued before, and wait for it."""
        if self._num_queued:
            self.submit(QueuedCall(call)).wait()
        else:
            call()

    def submit(self, queued: QueuedCall) -> QueuedCall:
        with self._lock:
            self._num_queued += 1
            self._queue.put(queued)
            if self._thread is None:
                self._thread = Background(
                    self._serve, self._name, on_failure=lambda error: None, attempts=FOREVER
                )
                self._thread.start()
        return queued

    def _serve(self) -> None:
        while (queued := self._queue.get()) is not None:
            queued.run()
            with self._lock:
                self._num_queued -= 1
            del queued  # nothing stays alive while this waits

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)
