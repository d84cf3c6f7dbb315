"""Tells what happened to a job, from the event files of all its workers.

Pure apart from reading files: steps in order with their losses, rounds with who was in them and how long the regroup
took, and the life of every worker. Lines that are torn or no events are counted and left out. Used by the report and
the demo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.events._event_types import (
    RoundFormed,
    StepCommitted,
    TrainingEvent,
    TrainingFinished,
    TrainingLeft,
)
from phalanx.events._lines import from_record
from phalanx.events._writer import parse_lines


@dataclass(frozen=True)
class StepMark:
    """A committed step."""

    time: float
    step: int
    loss: float | None
    samples: int
    round: tuple[int, int]
    """Generation and round."""


@dataclass(frozen=True)
class RoundMark:
    """A formed round; ``seconds`` is the longest time that a worker which was there before spent on it."""

    time: float
    round: tuple[int, int]
    workers: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]
    step: int
    seconds: float


@dataclass
class Life:
    """A worker from its first to its last sign; ``end`` is how it ended: finished, left or died."""

    worker: str
    born: float
    seen: float
    end: str = "died"


@dataclass
class History:
    steps: list[StepMark] = field(default_factory=list)
    rounds: list[RoundMark] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    num_torn: int = 0
    """Lines that were no events: cut short, or of something else."""

    @property
    def began(self) -> float:
        return min(life.born for life in self.lives) if self.lives else 0.0

    def throughput(self, window: int = 8) -> list[tuple[float, float]]:
        """(time, samples per second), each over a few steps."""
        points = []
        for i, (first, last) in enumerate(zip(self.steps, self.steps[window:], strict=False)):
            samples = sum(mark.samples for mark in self.steps[i + 1 : i + window + 1])
            if last.time > first.time:
                points.append((last.time, samples / (last.time - first.time)))
        return points


def read_history(log_dir: Path) -> History:
    """Return the history of the job whose workers wrote ``events-*.jsonl`` into a directory."""
    events: list[dict[str, Any]] = []
    num_torn = 0
    for path in sorted(log_dir.glob("events-*.jsonl")):
        try:
            found, torn = parse_lines(path.read_bytes())
        except OSError:
            found, torn = [], 1
        events += found
        num_torn += torn
    history = make_history(events)
    history.num_torn += num_torn
    return history


def make_history(records: Iterable[Any]) -> History:
    """Return the history that these events tell; what is none is counted and left out."""
    history = History()
    events: list[TrainingEvent] = []
    for record in records:
        try:
            event = from_record(record)
        except ValueError:
            history.num_torn += 1
            continue
        if isinstance(event, TrainingEvent):
            events.append(event)
    events.sort(key=lambda event: event.time)
    lives: dict[str, Life] = {}
    rounds: dict[tuple[int, int], list[RoundFormed]] = {}
    steps: dict[int, StepMark] = {}
    for event in events:
        life = lives.setdefault(event.worker, Life(event.worker, event.time, event.time))
        life.seen = event.time
        if isinstance(event, (TrainingLeft, TrainingFinished)):
            life.end = event.kind
        elif isinstance(event, RoundFormed):
            rounds.setdefault((event.generation, event.round), []).append(event)
        elif isinstance(event, StepCommitted):  # of a step that was committed twice, the later one counts
            steps[event.step] = _mark(event)
    history.lives = sorted(lives.values(), key=lambda life: life.born)
    history.steps = [steps[number] for number in sorted(steps)]
    history.rounds = [_round(key, told) for key, told in sorted(rounds.items())]
    members = {mark.round: mark.workers for mark in history.rounds}
    for step in history.steps:  # one worker wrote it down; all of its round were there
        for worker in members.get(step.round, ()):
            if worker in lives:
                lives[worker].seen = max(lives[worker].seen, step.time)
    return history


def _mark(event: StepCommitted) -> StepMark:
    # A loss that is infinite or nan has no place on a plot.
    loss = event.loss if event.loss is not None and abs(event.loss) < 1e300 else None
    return StepMark(event.time, event.step, loss, event.samples, (event.generation, event.round))


def _round(key: tuple[int, int], told: list[RoundFormed]) -> RoundMark:
    # Newcomers list everybody as joined; who was there before tells what really changed.
    before = [event for event in told if event.worker not in event.joined] or told
    return RoundMark(
        time=max(event.time for event in told),
        round=key,
        workers=told[0].workers,
        joined=before[0].joined,
        left=before[0].left,
        step=before[0].step,
        seconds=max(event.seconds for event in before),
    )
