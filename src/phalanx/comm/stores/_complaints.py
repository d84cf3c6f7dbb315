"""Names what a stranger wrote: once per key and minute, and not more than a log can bear.

Owns the limits. A value that cannot be used is ignored by whoever reads it and replaced by the next rightful write;
a person has to hear of it, but whoever can write garbage can write a thousand different ones per second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PER_KEY = 60.0
"""Seconds before a key is named again."""

BURST = 50
"""Lines per ``PER_KEY`` seconds, whatever their keys."""

_CLIP = 60


class Complaints:
    """Writes warnings to ``log``; thread-safe.

    >>> Complaints(logging.getLogger("demo")).say("rdzv/bells", "it holds b'x', not a number")
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        self._window = -PER_KEY
        self._left_out = 0

    def say(self, key: str, message: str) -> None:
        """Log ``message`` about ``key``, unless that key or too many others were complained about a moment ago."""
        now = self._clock()
        with self._lock:
            if now - self._window >= PER_KEY:
                left_out, self._left_out, self._window = self._left_out, 0, now
                self._said.clear()
                if left_out:
                    self._log.warning("%d more values that no worker or agent wrote were refused", left_out)
            if key in self._said or len(self._said) >= BURST:
                self._left_out += 1
                return
            self._said[key] = now
        self._log.warning("%s", message)


def clipped(value: bytes) -> str:
    """Return a value as a message shows it.

    >>> clipped(b"x" * 100)
    "b'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'... (100 bytes)"
    """
    return repr(value) if len(value) <= _CLIP else f"{value[:_CLIP]!r}... ({len(value)} bytes)"
