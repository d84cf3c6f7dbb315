"""Keeps the life of every worker as events tell it: when it was there, with which slots, and what happened to it.

Also the rounds, in which workers came and went together. Bounded: of what happens again and again the last is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from phalanx.events._agent_events import WorkerEvent, WorkerExited, WorkerFailed, WorkerHung, WorkerStarted
from phalanx.events._event_types import (
    AnyEvent,
    GroupLost,
    NotNeeded,
    RankTakenOver,
    RoundFormed,
    Saved,
    SlotsDealt,
    StateReceived,
    TrainingEvent,
    TrainingFinished,
    TrainingLeft,
    TrainingStarted,
)

MAX_MARKS = 100
MAX_ROUNDS = 1000
MAX_GONE = 512
"""Workers that have ended and are still shown."""


@dataclass
class Lifeline:
    """One worker. ``end`` is running, finished, left, surplus, died or ended (a process that told no more)."""

    worker: str
    born: float
    seen: float
    end: str = "running"
    rank: int = -1
    host: str = ""
    node_rank: int = -1
    pid: int = 0
    slots: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    """Each: since when, the first slot (None where they are apart), how many."""
    marks: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    """Each: when, what (join, death, leave, hang, save, state, end), and in words."""
    reason: str = ""
    stderr: tuple[str, ...] = ()
    stacks: str = ""

    def mark(self, time: float, what: str, text: str = "") -> None:
        self.marks.append([round(time, 3), what, text])

    def carry(self, time: float, first_slot: int | None, num_slots: int) -> None:
        """Note that these are its slots now."""
        if not self.slots or self.slots[-1][1:] != [first_slot, num_slots]:
            self.slots.append([round(time, 3), first_slot, num_slots])

    def to_record(self) -> dict[str, Any]:
        """Return the row of the page; what a click opens is ``detail``."""
        return {
            "worker": self.worker,
            "born": round(self.born, 3),
            "seen": round(self.seen, 3),
            "end": self.end,
            "rank": self.rank,
            "host": self.host,
            "slots": [list(one) for one in self.slots],
            "marks": [list(one) for one in self.marks],
        }

    def detail(self) -> dict[str, Any]:
        """Return all that is known of the worker."""
        return {
            **self.to_record(),
            "pid": self.pid,
            "node_rank": self.node_rank,
            "reason": self.reason,
            "stderr": list(self.stderr),
            "stacks": self.stacks,
        }


class Lifelines:
    """All workers, and the rounds."""

    def __init__(self) -> None:
        self.lives: dict[str, Lifeline] = {}
        self.rounds: deque[dict[str, Any]] = deque(maxlen=MAX_ROUNDS)
        self.num_rounds = 0
        self.members: tuple[str, ...] = ()
        self.newest = (-1, -1)
        """Generation and round of the last round."""

    def take(self, event: AnyEvent) -> None:
        """Note what an event says about a worker."""
        if isinstance(event, WorkerEvent):
            self._take_process(event)
        elif isinstance(event, WorkerHung):
            life = self.see(event.worker_id, event.time)
            life.mark(event.time, "hang", f"made no progress for {event.seconds:g} s")
            life.stacks = event.stacks
        elif isinstance(event, TrainingEvent) and event.worker:
            self._take_training(event)

    def see(self, worker: str, time: float) -> Lifeline:
        """Return a worker's life, in which it was seen at this time."""
        life = self.lives.get(worker)
        if life is None:
            life = self.lives[worker] = Lifeline(worker, time, time)
            self._forget_some()
        life.seen = max(life.seen, time)
        return life

    def _forget_some(self) -> None:
        gone = [name for name, life in self.lives.items() if life.end != "running"]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            del self.lives[name]

    def _take_process(self, event: WorkerEvent) -> None:
        life = self.see(event.worker_id, event.time)
        life.rank, life.host, life.node_rank, life.pid = event.rank, event.host, event.node_rank, event.pid
        if isinstance(event, WorkerStarted):
            life.born = min(life.born, event.time)
        elif isinstance(event, WorkerFailed):
            life.end, life.reason, life.stderr = "died", f"{event.cause}: {event.message}", event.stderr
            if life.marks and life.marks[-1][1] == "death":
                life.marks.pop()  # its exit was told a moment before, without a reason
            life.mark(event.time, "death", life.reason)
        elif isinstance(event, WorkerExited) and life.end == "running":
            life.end = "ended" if event.exit_code == 0 else "died"
            life.reason = life.reason or f"exit code {event.exit_code}"
            if event.exit_code:
                life.mark(event.time, "death", life.reason)

    def _take_training(self, event: TrainingEvent) -> None:
        life = self.see(event.worker, event.time)
        if isinstance(event, TrainingStarted):
            life.pid = event.pid
        elif isinstance(event, RoundFormed):
            self._take_round(event, life)
        elif isinstance(event, SlotsDealt):
            self._take_deal(event)
        elif isinstance(event, GroupLost):
            life.mark(event.time, "lost", event.reason)
        elif isinstance(event, Saved):
            life.mark(event.time, "save", f"step {event.step}")
        elif isinstance(event, StateReceived):
            life.mark(event.time, "state", f"took the state of step {event.step} from {event.source}")
        elif isinstance(event, RankTakenOver):
            life.mark(event.time, "state", f"took over rank {event.rank}")
        elif isinstance(event, (TrainingLeft, TrainingFinished, NotNeeded)):
            life.end = {"left": "left", "finished": "finished", "surplus": "surplus"}[event.kind]
            life.mark(event.time, "leave" if life.end == "left" else "end", f"{life.end} after step {event.step}")

    def _take_deal(self, event: SlotsDealt) -> None:
        first = 0
        for worker, size in zip(event.workers, event.sizes, strict=False):
            life = self.see(worker, event.time)
            are_apart = bool(life.slots) and life.slots[-1][1] is None
            life.carry(event.time, None if are_apart else first, size)
            first += size

    def _take_round(self, event: RoundFormed, life: Lifeline) -> None:
        if event.rank is not None:
            life.rank = event.rank
        if event.num_slots is not None:
            life.carry(event.time, event.first_slot, event.num_slots)
        is_new = event.worker in event.joined
        if is_new:
            life.mark(event.time, "join", f"joined at step {event.step}")
        key = (event.generation, event.round)
        if key < self.newest:
            return
        for worker in event.left:
            other = self.lives.get(worker)
            if other is not None and other.end == "running":
                other.end = "died"
                other.mark(event.time, "death", other.reason or "the others lost it")
        if key > self.newest:
            self.newest, self.members = key, event.workers
            self.rounds.append(_round_record(event))
            self.num_rounds += 1
        elif not is_new:  # newcomers list everybody as joined; who was there before tells what really changed
            before = self.rounds[-1]
            seconds = max(event.seconds, before["seconds"] if before["told_by_old"] else 0.0)
            self.rounds[-1] = {**_round_record(event), "seconds": seconds}


def _round_record(event: RoundFormed) -> dict[str, Any]:
    return {
        "time": round(event.time, 3),
        "generation": event.generation,
        "round": event.round,
        "workers": len(event.workers),
        "joined": list(event.joined),
        "left": list(event.left),
        "step": event.step,
        "seconds": event.seconds,
        "verified": event.is_verified,
        "told_by_old": event.worker not in event.joined,
    }
