"""Measures what this worker spends on each step: computing, waiting for others, waiting for data, saving.

Owns the lap timer that ``Step`` and ``Job`` mark, and the lines that are written of it: about one a second, whatever
the speed. What a slot took rides along in the reduction (``Dealing``); the rest of what a worker measured is put
together with the others' by ``phalanx.watch``.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from phalanx.comm.group._observe import tally_bytes
from phalanx.events._event_types import WorkerStepTimes
from phalanx.events._writer import EventLog

COMPUTE, WAIT, DATA, SAVE = range(4)

WRITE_EVERY = 1.0
"""Seconds between two lines."""
MAX_STEPS = 512
"""Steps in one line."""


class WorkerPace(NamedTuple):
    """What a worker says of itself."""

    times: tuple[int, ...] = ()
    """Microseconds that a step takes it, lately: computation, waiting for others, waiting for data."""
    slots: int = -1


class StepClock:
    """A lap goes to a part when it is over; what lies between two steps goes nowhere.

    >>> clock = StepClock(EventLog(None))
    >>> clock.begin(); clock.lap(DATA); clock.commit(0)
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._laps = [0.0, 0.0, 0.0, 0.0]
        self._slot_began = (0.0, 0.0)
        self._began = self._last = 0.0
        self._is_in_step = False
        self._waits = False
        self._first = -1
        self._steps: list[list[float]] = []
        """The laps of each step that is not yet written."""
        self._lately: list[float] = []
        self._written = 0.0
        self._bytes: dict[str, int] = {}
        """Of all collectives so far, by their names; what of it is written is in ``_told``."""
        self._told: dict[str, int] = {}

    def counting(self) -> AbstractContextManager[None]:
        """Count the bytes of this worker's collectives while the context lasts, by their names."""
        return tally_bytes(self._bytes) if self._events.is_on else nullcontext()

    def begin(self) -> None:
        """Begin a step."""
        self._laps = [0.0, 0.0, 0.0, 0.0]
        self._slot_began = (0.0, 0.0)
        self._is_in_step = True
        self._waits = False
        self._began = self._last = time.perf_counter()

    def since_begin(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began

    def lap(self, part: int) -> None:
        """Count the time since the last lap as ``part``."""
        if self._is_in_step:
            now = time.perf_counter()
            self._laps[part] += now - self._last
            self._last = now

    def turn(self, is_waiting: bool) -> None:
        """Count the time since the last lap as computation, or as waiting for others if that was said before."""
        self.lap(WAIT if self._waits else COMPUTE)
        self._waits = is_waiting

    def end_slot(self) -> tuple[float, float]:
        """Return the seconds since the last slot's end that were spent on computation, and on its data."""
        self.lap(COMPUTE)
        before, self._slot_began = self._slot_began, (self._laps[COMPUTE], self._laps[DATA])
        return self._slot_began[0] - before[0], self._slot_began[1] - before[1]

    def commit(self, number: int) -> None:
        """End a step that this worker has committed."""
        if not self._is_in_step:
            return
        self.lap(COMPUTE)
        self._is_in_step = False
        before = self._lately or self._laps
        self._lately = [0.8 * old + 0.2 * new for old, new in zip(before, self._laps, strict=True)]
        if not self._events.is_on:
            return
        if number != self._first + len(self._steps):
            self.flush()
            self._first = number
        self._steps.append(self._laps)  # made anew by the next step; what can wait is done when they are written
        if self._last - self._written >= WRITE_EVERY or len(self._steps) >= MAX_STEPS:
            self.flush()

    def pace(self, num_slots: int) -> WorkerPace:
        """Return what a step takes, as a mean in which each step counts for a fifth of what is left."""
        lately = self._lately or self._laps
        return WorkerPace(tuple(int(1e6 * lately[part]) for part in (COMPUTE, WAIT, DATA)), num_slots)

    def drop(self) -> tuple[float, float]:
        """End a step that is thrown away; the seconds of its work, and those that were waited for others."""
        if not self._is_in_step:
            return 0.0, 0.0
        self._is_in_step = False
        compute, wait, data, save = self._laps
        self.flush()
        return compute + data + save, wait

    def flush(self) -> None:
        """Write what is measured and not yet written."""
        if self._steps:
            laps = [tuple(int(1e6 * lap) for lap in part) for part in zip(*self._steps, strict=True)]
            compute, wait, data, save = laps
            counted = dict(self._bytes)  # another thread may be counting
            more = {name: count - self._told.get(name, 0) for name, count in counted.items()}
            self._told = counted
            self._events.write(
                WorkerStepTimes(
                    step=self._first,
                    compute=compute,
                    wait=wait,
                    data=data,
                    save=save if any(save) else (),
                    collective_bytes={name: count for name, count in more.items() if count} or None,
                )
            )
            self._first += len(self._steps)
            self._steps = []
        self._written = time.perf_counter()
