"""What happened to a job, read from the event files of all its workers.

Pure apart from reading files: steps in order with their losses, rounds with who was in them and how long the regroup
took, and the life of every worker. Used by the report and the demo.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.elastic._records import read_lines


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

    @property
    def began(self) -> float:
        return min(life.born for life in self.lives) if self.lives else 0.0

    def throughput(self, window: int = 8) -> list[tuple[float, float]]:
        """(time, samples per second), each over a few steps."""
        points = []
        for first, last in zip(self.steps, self.steps[window:], strict=False):
            samples = sum(s.samples for s in self.steps if first.step < s.step <= last.step)
            if last.time > first.time:
                points.append((last.time, samples / (last.time - first.time)))
        return points


def read_history(log_dir: Path) -> History:
    """The history of the job whose workers wrote ``events-*.jsonl`` into a directory."""
    events: list[dict[str, Any]] = []
    for path in sorted(log_dir.glob("events-*.jsonl")):
        events += read_lines(path)
    events.sort(key=lambda event: event["time"])
    history = History()
    lives: dict[str, Life] = {}
    rounds: dict[tuple[int, int], list[dict[str, Any]]] = {}
    steps: dict[int, StepMark] = {}
    for event in events:
        life = lives.setdefault(event["worker"], Life(event["worker"], event["time"], event["time"]))
        life.seen = event["time"]
        kind = event["event"]
        if kind in ("left", "finished"):
            life.end = kind
        elif kind == "regrouped":
            rounds.setdefault((event["generation"], event["round"]), []).append(event)
        elif kind == "step":  # of a step that was committed twice, the later one counts
            key = (event["generation"], event["round"])
            steps[event["step"]] = StepMark(
                event["time"], event["step"], event["loss"], event["samples"], key
            )
    history.lives = sorted(lives.values(), key=lambda life: life.born)
    history.steps = [steps[number] for number in sorted(steps)]
    history.rounds = [_round(key, told) for key, told in sorted(rounds.items())]
    members = {mark.round: mark.workers for mark in history.rounds}
    for step in history.steps:  # one worker wrote it down; all of its round were there
        for worker in members.get(step.round, ()):
            if worker in lives:
                lives[worker].seen = max(lives[worker].seen, step.time)
    return history


def _round(key: tuple[int, int], told: list[dict[str, Any]]) -> RoundMark:
    # Newcomers list everybody as joined; who was there before tells what really changed.
    before = [event for event in told if event["worker"] not in event["joined"]] or told
    return RoundMark(
        time=max(event["time"] for event in told),
        round=key,
        workers=tuple(told[0]["workers"]),
        joined=tuple(before[0]["joined"]),
        left=tuple(before[0]["left"]),
        step=before[0]["step"],
        seconds=max(event["seconds"] for event in before),
    )
