"""Tells what cannot be written just now: said loudly, shown in the status line, and once more at the end.

A full or read-only disk must not end training. Whoever writes (saves, audit, events) tells here what failed and that it
works again; this says it (on stderr, if nothing else is given) when it begins, about every minute while it lasts, and
when it is over. Nothing here raises, not even when stderr lies on the same full disk.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

AGAIN = 60.0
"""Seconds between two lines about the same trouble."""


@dataclass
class _Trouble:
    since: float
    said: float
    text: str
    count: int = 1


class Backoff:
    """When to try again: after 1 s, then twice as long each time, up to a minute.

    >>> backoff = Backoff(clock=lambda: 0.0)
    >>> [backoff.fail() for _ in range(7)], backoff.pause
    ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0], 60.0)
    """

    FIRST, LONGEST = 1.0, 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = float("-inf")
        self._delay = self.FIRST

    @property
    def pause(self) -> float:
        """Return the seconds until the next attempt is due; 0 when it is."""
        return max(0.0, self._due - self._clock())

    def fail(self) -> float:
        """Return an attempt has failed; the seconds until the next one."""
        delay, self._delay = self._delay, min(2 * self._delay, self.LONGEST)
        self._due = self._clock() + delay
        return delay

    def reset(self) -> None:
        self._due, self._delay = float("-inf"), self.FIRST


class Troubles:
    """Remembers what is in trouble ("saves", "audit", "events"), and says so; ``consequence`` ends the sentence."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        say: Callable[[str], None] | None = None,
        consequence: str = "training goes on",
    ) -> None:
        self._clock = clock
        self._say = say
        self._consequence = consequence
        self._lock = threading.Lock()
        self._open: dict[str, _Trouble] = {}
        self._lost: dict[str, str] = {}

    def failed(self, what: str, text: str) -> None:
        """``text`` says what failed and what happens now."""
        now = self._clock()
        with self._lock:
            trouble = self._open.get(what)
            if trouble is None:
                self._open[what] = _Trouble(now, now, text)
            else:
                trouble.text, trouble.count = text, trouble.count + 1
                if now - trouble.said < AGAIN:
                    return
                trouble.said = now
        self._tell(f"{text}; {self._consequence}")

    def worked(self, what: str) -> None:
        with self._lock:
            trouble = self._open.pop(what, None)
        if trouble is not None:
            seconds = self._clock() - trouble.since
            self._tell(f"{what} can be written again, after {trouble.count} failed attempts in {seconds:.0f} s")

    def lost(self, what: str, text: str) -> None:
        """Something will never be written; said at the end, whatever happens until then."""
        with self._lock:
            self._lost[what] = text

    @property
    def status(self) -> str:
        """For the status line; empty when all is well."""
        with self._lock:
            names = sorted({*self._open, *self._lost})
        return f"{', '.join(names)} CANNOT BE WRITTEN" if names else ""

    def say_last_words(self) -> None:
        """Say the last lines of a run: what is not on the disk, and why. Once."""
        with self._lock:
            words = [*self._lost.values(), *(t.text for w, t in self._open.items() if w not in self._lost)]
            self._lost, self._open = {}, {}
        for text in words:
            self._tell(f"AT THE END: {text}")

    def _tell(self, text: str) -> None:
        (self._say or say)(text)


def say(text: str) -> None:
    """Write a line on stderr, if it can be written."""
    try:
        print(f"phalanx: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # full, or closed
        pass
