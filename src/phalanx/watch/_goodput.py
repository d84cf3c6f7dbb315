"""Accounts for every second of every worker: what it was spent on, as the events tell it. Pure.

Each worker's life, from its first to its last sign, is cut at its events; each piece goes to one part. Inside the
pieces in which steps are made, what workers measured claims its share, and what nobody claims is productive. Times are
whole microseconds, so the parts add up to the lives exactly, for any events in any order.

Waiting for stragglers is what a worker waited longer for a step than the one that waited the shortest: that one came
last, and its wait is the exchange alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from phalanx.events._agent_events import JobEvent, ShutDown, WorkerEvent, WorkerExited, WorkerFailed, WorkerHung
from phalanx.events._event_types import (
    AnyEvent,
    GroupLost,
    NotNeeded,
    RoundFormed,
    StepCommitted,
    StepsRepeated,
    TrainingEvent,
    TrainingFinished,
    TrainingLeft,
    WorkerStepTimes,
)

PARTS = {
    "productive": "computing steps that count, and exchanging their gradients",
    "start": "from the start of the process to the first call of the job's loop",
    "rendezvous": "until the worker had its first place among the others",
    "regroup": "until it had its place again, after a change",
    "state_transfer": "bringing all workers of a round to one state",
    "repeated": "work on steps that was thrown away, or was done before",
    "stragglers": "waiting for workers that came later to the same step",
    "data": "waiting for samples",
    "save": "held up by a save",
    "surplus": "a worker without slots, or one that nobody needed",
    "hang": "hanging, or waiting for one that hung",
    "end": "after the last step: the end of the script, and waiting for the others'",
    "untold": "a worker that told nothing (its script runs no elastic job)",
}
"""Every part, with what it means."""

STEPPING = "stepping"
MAX_OPEN_STEPS = 4096
"""Steps for which the words of some workers may still be missing."""
LOST_CONTACT = "lost contact"
"""The cause of a worker that only died of another's death: no failure of its own."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Worker-seconds by part; ``parts`` add up to ``total`` exactly (both count microseconds)."""

    parts: dict[str, int]
    total: int
    num_failures: int = 0
    repair_seconds: tuple[float, ...] = ()
    """Of each failure that was got over: until the next step was committed."""
    seconds: float = 0.0
    """From the first event to the last."""

    @property
    def share(self) -> float:
        """Productive worker-seconds of all; 1 for a job that has none yet."""
        return self.parts["productive"] / self.total if self.total else 1.0

    @property
    def mean_repair(self) -> float | None:
        return sum(self.repair_seconds) / len(self.repair_seconds) if self.repair_seconds else None

    @property
    def mean_between_failures(self) -> float | None:
        return self.seconds / self.num_failures if self.num_failures else None

    def __str__(self) -> str:
        """
        >>> print(goodput([]))
        goodput 100.0%, no failures
        """
        if not self.num_failures:
            return f"goodput {100 * self.share:.1f}%, no failures"
        text = f"goodput {100 * self.share:.1f}%, {self.num_failures} failure{'s' if self.num_failures > 1 else ''}"
        if self.mean_repair is not None:
            text += f", MTTR {span(self.mean_repair)}"
        return f"{text}, MTBF {span(self.seconds / self.num_failures)}"

    def to_record(self) -> dict[str, Any]:
        """Return it for JSON, in seconds."""
        return {
            "goodput": round(self.share, 6),
            "worker_seconds": self.total / 1e6,
            "parts": {name: value / 1e6 for name, value in self.parts.items()},
            "failures": self.num_failures,
            "mttr_seconds": self.mean_repair,
            "mtbf_seconds": self.mean_between_failures,
            "seconds": self.seconds,
            "text": str(self),
        }


def span(seconds: float) -> str:
    """Return a time as people say it.

    >>> span(0.214), span(75), span(11160)
    ('0.21 s', '75.0 s', '3.1 h')
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def goodput(events: Iterable[AnyEvent], *, now: float | None = None) -> Goodput:
    """Return the account of a job's events; with ``now`` (seconds since 1970) of one that still runs.

    >>> from phalanx.events._event_types import TrainingStarted
    >>> began = TrainingStarted(worker="w", time=1.0, pid=7)
    >>> account = goodput([began, TrainingFinished(worker="w", time=3.5, step=0)])
    >>> account.total, account.parts["start"]
    (2500000, 2500000)
    """
    accounts = Accounts()
    for event in sorted(events, key=_time_of):
        accounts.take(event)
    return accounts.result(now=now)


def _time_of(event: AnyEvent) -> float:
    return event.time if isinstance(event, (JobEvent, TrainingEvent)) else event.timestamp


@dataclass
class _WorkerAccount:
    """One worker: pieces of its life by what they were spent on, and claims on the pieces in which it made steps."""

    first: int
    last: int
    label: str = "start"
    spent: dict[str, int] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    num_rounds: int = 0
    is_over: bool = False
    is_training: bool = False
    is_surplus: bool = False

    def advance(self, time: int) -> None:
        """Count the time up to a moment; one that has passed already changes nothing."""
        if time > self.last and not self.is_over:
            self.spent[self.label] = self.spent.get(self.label, 0) + time - self.last
            self.last = time

    def claim(self, part: str, amount: int) -> None:
        self.claims[part] = self.claims.get(part, 0) + max(0, amount)

    def parts(self, until: int) -> dict[str, int]:
        """Return what its life up to a moment was spent on."""
        spent = dict(self.spent)
        if until > self.last and not self.is_over:
            spent[self.label] = spent.get(self.label, 0) + until - self.last
        if self.is_surplus or not self.is_training:
            return {"surplus" if self.is_surplus else "untold": sum(spent.values())}
        left = spent.pop(STEPPING, 0)
        for part in ("hang", "repeated", "data", "save", "stragglers"):
            share = min(left, self.claims.get(part, 0))
            spent[part] = spent.get(part, 0) + share
            left -= share
        spent["productive"] = spent.get("productive", 0) + left
        return spent


class Accounts:
    """Keeps the account of a job that runs, event by event. ``take`` expects each worker's events in order."""

    def __init__(self) -> None:
        self._lives: dict[str, _WorkerAccount] = {}
        self._waits: dict[int, dict[str, int]] = {}
        self._members: tuple[str, ...] = ()
        self._repeats: list[tuple[float, int, int]] = []
        self._hangs: list[float] = []
        self._failed_at: list[float] = []
        self._open: list[float] = []
        self._repairs: list[float] = []
        self._began = float("inf")
        self._latest = 0.0

    def take(self, event: AnyEvent) -> None:
        """Count one event."""
        time = _time_of(event)
        if time <= 0:
            return  # never written: it says nothing about when
        self._began, self._latest = min(self._began, time), max(self._latest, time)
        if isinstance(event, WorkerEvent):
            self._take_process(event)
        elif isinstance(event, WorkerHung):
            self._hangs.append(time)
            life = self._life(event.worker_id, time)
            life.advance(_micro(time))
            life.claim("hang", _micro(event.seconds))
        elif isinstance(event, ShutDown):
            self._close_all(event)
        elif isinstance(event, StepCommitted):
            self.take_commit(event)
        elif isinstance(event, TrainingEvent):
            self._take_training(event)

    def take_commit(self, event: StepCommitted) -> None:
        """Count a committed step: of all events by far the most."""
        time = event.time
        if time <= 0:
            return
        self._began, self._latest = min(self._began, time), max(self._latest, time)
        life = self._life(event.worker, time)
        life.is_training = True
        life.advance(_micro(time))
        if self._open:
            self._repairs += [time - failed for failed in self._open if time >= failed]
            self._open = [failed for failed in self._open if time < failed]

    def result(self, *, now: float | None = None) -> Goodput:
        """Return the account so far; ``now``: the job runs, and workers that have not ended still live."""
        parts = dict.fromkeys(PARTS, 0)
        stragglers = self._open_stragglers()
        for name, life in self._lives.items():
            until = _micro(now) if now is not None and name in self._members else life.last
            before = life.claims.get("stragglers", 0)
            life.claims["stragglers"] = before + stragglers.get(name, 0)
            for part, amount in life.parts(until).items():
                parts[part] += amount
            life.claims["stragglers"] = before
        latest = self._latest if now is None else max(now, self._latest)
        return Goodput(
            parts=parts,
            total=sum(parts.values()),
            num_failures=len(self._failed_at),
            repair_seconds=tuple(self._repairs),
            seconds=max(0.0, latest - self._began) if self._lives else 0.0,
        )

    def _life(self, worker: str, time: float) -> _WorkerAccount:
        found = self._lives.get(worker)
        if found is None:
            found = self._lives[worker] = _WorkerAccount(_micro(time), _micro(time))
        return found

    def _take_process(self, event: WorkerEvent) -> None:
        life = self._life(event.worker_id, event.time)
        life.advance(_micro(event.time))
        if isinstance(event, WorkerFailed) and event.cause != LOST_CONTACT:
            self._failed_at.append(event.time)
            self._open.append(event.time)
        if isinstance(event, (WorkerExited, WorkerFailed)):
            life.is_over = True

    def _close_all(self, event: ShutDown) -> None:
        """The agents say that it is over; each of them, so what others still tell is not lost by it."""
        if event.succeeded:
            for life in self._lives.values():
                life.advance(_micro(event.time))

    def _take_training(self, event: TrainingEvent) -> None:
        life, time = self._life(event.worker, event.time), _micro(event.time)
        life.is_training = True
        if isinstance(event, RoundFormed):
            self._take_round(event, life)
            return
        life.advance(time)
        if isinstance(event, WorkerStepTimes):
            self._take_times(event, life)
        elif isinstance(event, GroupLost):
            waited = event.waited or 0.0
            hung = any(event.time - waited - 1 <= moment <= event.time + 1 for moment in self._hangs)
            life.claim("repeated", _micro(event.dropped or 0.0))
            life.claim("hang" if hung else "stragglers", _micro(waited))
            life.label = "regroup"
        elif isinstance(event, StepsRepeated):
            self._repeats.append((event.time, event.step, event.before))
        elif isinstance(event, NotNeeded):
            life.is_surplus = True
        elif isinstance(event, (TrainingLeft, TrainingFinished)):
            life.label = "end"

    def _take_round(self, event: RoundFormed, life: _WorkerAccount) -> None:
        end = _micro(event.time)
        life.advance(end - _micro(event.seconds))
        life.label = "regroup" if life.num_rounds else "rendezvous"
        life.advance(end - _micro(event.state_seconds or 0.0))
        life.label = "state_transfer"
        life.advance(end)
        life.label = "surplus" if event.num_slots == 0 else STEPPING
        life.num_rounds += 1
        self._members = event.workers
        for worker in event.left:
            other = self._lives.get(worker)
            if other is not None:
                other.advance(end - _micro(event.seconds))
                other.is_over = True

    def _take_times(self, event: WorkerStepTimes, life: _WorkerAccount) -> None:
        life.claim("data", sum(event.data))
        life.claim("save", sum(event.save))
        since, begin, end = max(self._repeats, default=(0.0, 0, 0))
        worker, size, waits_of = event.worker, len(self._members), self._waits
        for step, (compute, wait) in enumerate(zip(event.compute, event.wait, strict=False), event.step):
            if begin <= step < end and event.time >= since:
                life.claim("repeated", compute + wait)
                continue
            waits = waits_of.get(step)
            if waits is None:
                waits = waits_of[step] = {}
            waits[worker] = wait
            if len(waits) >= size:
                self._settle(waits_of.pop(step))
        while len(waits_of) > MAX_OPEN_STEPS:
            self._settle(waits_of.pop(min(waits_of)))

    def _settle(self, waits: dict[str, int]) -> None:
        """Count what each waited for stragglers in one step: no more words about it are expected."""
        shortest, lives = min(waits.values()), self._lives
        for name, wait in waits.items():
            claims = lives[name].claims
            claims["stragglers"] = claims.get("stragglers", 0) + wait - shortest

    def _open_stragglers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for waits in self._waits.values():
            for name, amount in _beyond_shortest(waits).items():
                found[name] = found.get(name, 0) + amount
        return found


def _beyond_shortest(waits: dict[str, int]) -> dict[str, int]:
    """Return what each waited longer than the one that waited the shortest; nothing is known of one alone.

    >>> _beyond_shortest({"a": 5, "b": 30})
    {'a': 0, 'b': 25}
    """
    shortest = min(waits.values())
    return {name: wait - shortest for name, wait in waits.items()}


def _micro(seconds: float) -> int:
    return round(seconds * 1e6) if abs(seconds) < 1e12 else 0
