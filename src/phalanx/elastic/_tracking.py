"""Logs committed steps to experiment trackers: one run for the whole job, each step once, by whoever is first now.

Owns who logs (the worker of rank 0), when a tracker is opened (at its first step, so that nobody else ever opens one)
and from which step on: a tracker says which step its run lacks. Earlier ones are left out: they have the same values,
since a step that is computed again has the same bits. Later ones that the lost first worker told its tracker, which had
not passed them on, are told again: every worker keeps the last ones. A tracker that fails is said once, and the job
goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from phalanx.events._troubles import say

KEPT = 4096
"""Steps whose values a worker keeps, in case that the one which logs is lost before its tracker has them."""


@runtime_checkable
class Tracker(Protocol):
    """What ``Job(trackers=[...])`` takes. One that has a method ``close`` is closed at the end.

    >>> class Printed:
    ...     def begin(self, run, step):
    ...         return step
    ...     def log(self, step, values):
    ...         print(step, dict(values))
    >>> isinstance(Printed(), Tracker)
    True
    """

    def begin(self, run: str, step: int) -> int:
        """Begin the run of this name, or go on with it; return the first step that it lacks. ``step`` is the next.

        When it lacks earlier ones, those follow first, as far as this worker has them: the last ``KEPT``.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""


class Tracking:
    """Gives each committed step to each tracker, once.

    >>> Tracking([], "demo").tell(0, {"loss": 0.5})
    """

    def __init__(self, trackers: Sequence[Tracker], run: str) -> None:
        for tracker in trackers:
            if not isinstance(tracker, Tracker):
                raise TypeError(
                    f"trackers has a {type(tracker).__name__}; expected objects with begin(run, step) and "
                    "log(step, values), such as those of phalanx.integrations.trackers"
                )
        self._trackers = list(trackers)
        self._run = run
        self._next: dict[int, int] = {}
        """By the number of an open tracker: the first step that its run lacks."""
        self._failed: set[int] = set()
        self._kept: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT)

    def keep(self, step: int, values: Mapping[str, float | None]) -> None:
        """Keep the values of a step that another worker logs; those that are None are left out."""
        if self._trackers:
            self._kept.append((step, {name: float(value) for name, value in values.items() if value is not None}))

    def tell(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log a step, after those before it that a run lacks."""
        self.keep(step, values)
        for number, tracker in enumerate(self._trackers):
            if number in self._failed:
                continue
            try:
                if number not in self._next:
                    self._next[number] = tracker.begin(self._run, step)
                self._log(number, tracker)
            except Exception as error:  # another's code, and often another's server
                self._fail(number, error)

    def _log(self, number: int, tracker: Tracker) -> None:
        """Log what is kept and the run lacks: mostly the last step alone."""
        lacking: dict[int, dict[str, float]] = {}
        for step, given in reversed(self._kept):
            if step < self._next[number]:
                break
            lacking.setdefault(step, given)
        for step in sorted(lacking):
            tracker.log(step, lacking[step])
            self._next[number] = step + 1

    def close(self) -> None:
        """End what is open: at the end of the job, or when another worker is the first. Opened again if need be."""
        for number in list(self._next):
            del self._next[number]
            close = getattr(self._trackers[number], "close", None)
            try:
                if close is not None:
                    close()
            except Exception as error:
                self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        self._failed.add(number)
        self._next.pop(number, None)
        name = type(self._trackers[number]).__name__
        say(f"the tracker {name} failed: {type(error).__name__}: {error}; it is left out, training goes on")
