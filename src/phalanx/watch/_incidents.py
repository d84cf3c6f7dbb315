"""Finds incidents in the stream of events: what went wrong, and how long each stage of getting over it took. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from phalanx.events._agent_events import WorkerFailed, WorkerHung
from phalanx.events._event_types import AnyEvent, GroupLost, RoundFormed, StepCommitted
from phalanx.watch._goodput import LOST_CONTACT

MAX_KEPT = 500
SAME = 5.0
"""Seconds within which the word of a survivor and that of an agent are about one incident."""


@dataclass
class Incident:
    """One failure. Times are seconds after ``time``; None: not yet."""

    time: float
    cause: str
    text: str
    workers: list[str] = field(default_factory=list)
    size: int = 0
    """How many workers computed before it."""
    generation: int = -1
    detected: float | None = None
    """A survivor knew."""
    regrouped: float | None = None
    """The survivors had their new group."""
    next_step: float | None = None
    """The next step was committed."""
    full: float | None = None
    """As many workers computed as before."""

    @property
    def is_over(self) -> bool:
        return None not in (self.regrouped, self.next_step, self.full)

    def to_record(self) -> dict[str, Any]:
        times = {name: getattr(self, name) for name in ("detected", "regrouped", "next_step", "full")}
        return {
            "time": round(self.time, 3),
            "cause": self.cause,
            "text": self.text,
            "workers": self.workers,
            "size": self.size,
            "generation": self.generation,
            **{f"{name}_ms": None if value is None else round(1e3 * value, 1) for name, value in times.items()},
        }


class Incidents:
    """Takes the events in order."""

    def __init__(self) -> None:
        self.found: deque[Incident] = deque(maxlen=MAX_KEPT)
        self._size = 0
        self._hung: dict[str, str] = {}

    def take(self, event: AnyEvent) -> None:
        """Note what an event says about an incident."""
        if isinstance(event, WorkerHung):
            self._hung[event.worker_id] = f"made no progress for {event.seconds:g} s"
        elif isinstance(event, WorkerFailed):
            if event.cause != LOST_CONTACT:
                self._open(event)
        elif isinstance(event, GroupLost):
            self._detect(event)
        elif isinstance(event, RoundFormed):
            for one in self._unfinished(event.time):
                if one.regrouped is None and event.generation > one.generation:
                    one.regrouped = event.time - one.time
                if one.full is None and one.regrouped is not None and len(event.workers) >= one.size:
                    one.full = event.time - one.time
            self._size = len(event.workers)
        elif isinstance(event, StepCommitted):
            for one in self._unfinished(event.time):
                if one.next_step is None and event.generation > one.generation:
                    one.next_step = event.time - one.time

    def _unfinished(self, now: float) -> list[Incident]:
        return [one for one in self.found if not one.is_over and one.time <= now]

    def _open(self, event: WorkerFailed) -> None:
        text = self._hung.pop(event.worker_id, event.message)
        for one in reversed(self.found):  # a survivor told of it before the agent did
            if one.cause == LOST_CONTACT and one.generation == event.generation and not one.is_over:
                before, one.time = one.time, min(one.time, event.time)
                one.detected = before - one.time
                one.cause, one.text = event.cause, text
                one.workers.append(event.worker_id)
                return
        self.found.append(
            Incident(
                time=event.time,
                cause=event.cause,
                text=text,
                workers=[event.worker_id],
                size=self._size,
                generation=event.generation,
            )
        )

    def _detect(self, event: GroupLost) -> None:
        for one in self._unfinished(event.time + SAME):
            if one.generation == event.generation:
                if one.detected is None:
                    one.detected = max(0.0, event.time - one.time)
                return
        self.found.append(
            Incident(
                time=event.time,
                cause=LOST_CONTACT,
                text=event.reason,
                size=self._size,
                generation=event.generation,
                detected=0.0,
            )
        )
