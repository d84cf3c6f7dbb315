"""SIGTERM as a polite request to leave: the worker finishes its step, hands over and exits with code 0.

Owns the handler, only while the job's loop runs and only in the main thread. A second SIGTERM is not polite any more:
it does what it did before the loop.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class LeaveRequest:
    def __init__(self) -> None:
        self.requested = False
        self.announced_in = -1
        """The generation whose other workers were told."""
        self.is_counted = False
        """Whether the reduction of the last step carried it, so that all workers know of it at the boundary."""

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Take SIGTERM as a request to leave, for the time of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)

        def handle(signum: int, frame: FrameType | None) -> None:
            self.requested = True
            signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
