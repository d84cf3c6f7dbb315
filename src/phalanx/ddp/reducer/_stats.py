"""Keeps the times of a step, of which the logging data is made. Owns clocks and counters, decides nothing.

Recorded for the first ten synchronised steps, then for one in every ``sample_rate``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class StepTimes:
    """Moments of one synchronised step, in seconds of one monotonic clock."""

    forward_start: float = 0.0
    forward_end: float = 0.0
    backward_start: float = 0.0
    backward_end: float = 0.0
    first_launch: float = 0.0
    comm_end: float = 0.0
    ready: list[float] = field(default_factory=list)

    @property
    def forward_compute(self) -> float:
        return max(0.0, self.forward_end - self.forward_start)

    @property
    def backward_compute(self) -> float:
        return max(0.0, self.backward_end - self.backward_start)

    @property
    def communication(self) -> float:
        return max(0.0, self.comm_end - self.first_launch)

    @property
    def overlap(self) -> float:
        """How long communication was under way while backward still computed."""
        return max(0.0, min(self.backward_end, self.comm_end) - self.first_launch)


class Stats:
    """Latest and average times, and counters, of one wrapped module."""

    FIRST_STEPS = 10

    def __init__(self, sample_rate: int = 100) -> None:
        self.sample_rate = sample_rate
        self.steps = 0
        self.sampled = 0
        self.latest = StepTimes()
        self.sums = {"forward_compute": 0.0, "backward_compute": 0.0, "communication": 0.0, "overlap": 0.0}
        self.rebuilds = 0
        self.unused: list[str] = []
        self.unused_changed = False
        self.error = ""
        self.current = StepTimes()

    now = staticmethod(time.perf_counter)

    def begin_step(self) -> None:
        self.current = StepTimes()

    def end_step(self, unused: list[str]) -> None:
        if self.steps and unused != self.unused:
            self.unused_changed = True
        self.unused = unused
        if self.steps < self.FIRST_STEPS or self.steps % self.sample_rate == 0:
            self.sampled += 1
            self.latest = self.current
            for name in self.sums:
                self.sums[name] += getattr(self.current, name)
        self.steps += 1

    def average(self, name: str) -> float:
        return self.sums[name] / max(1, self.sampled)
