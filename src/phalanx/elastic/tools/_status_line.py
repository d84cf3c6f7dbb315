"""Shows where the job is, on the first worker: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from phalanx.events._event_types import StepCommitted
from phalanx.events._troubles import say

FIRST_LINES = 3
"""Plain lines that come with the first steps, one each."""
LINE_EVERY = 5.0
"""Seconds between plain lines."""


class StatusLine:
    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._live: Any = None
        self._last_line = float("-inf")
        self._num_lines = 0
        self._last: tuple[float, int] = (0.0, -2)
        """When a step was committed, and which: before the first one none that it could follow."""
        self._rate = 0.0

    def show(self, step: StepCommitted, status: str) -> None:
        """Show a committed step; ``status`` says what is in trouble."""
        if not self.enabled:
            return
        self._measure(step)
        loss = "-" if step.loss is None else f"{step.loss:.4f}"
        text = (
            f"step {step.step}  epoch {step.epoch}  loss {loss}  {self._rate:.0f} samples/s  "
            f"generation {step.generation}  {step.world_size} worker{'' if step.world_size == 1 else 's'}"
        )
        if status:
            text += f"  {status}"
        if sys.stderr.isatty():
            self._show_live(text)
        elif self._num_lines < FIRST_LINES or time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            self._num_lines += 1
            say(text)

    def _measure(self, step: StepCommitted) -> None:
        now = time.monotonic()
        before, number = self._last
        if step.step == number + 1 and now > before:
            rate = step.samples / (now - before)
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        self._last = (now, step.step)

    def _show_live(self, text: str) -> None:
        from rich.console import Console  # start-up: loaded when used
        from rich.live import Live

        try:
            if self._live is None:
                self._live = Live(console=Console(stderr=True), refresh_per_second=8)
                self._live.start()
            self._live.update(text)
        except OSError:  # the terminal is gone; training does not need it
            self.enabled = False

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except OSError:
                pass
