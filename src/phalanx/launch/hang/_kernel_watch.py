"""Finds workers that the kernel holds: in uninterruptible sleep for so long that they will hardly come back.

Owns the rule. Such a process waits for a device or a file system that does not answer; no signal reaches it, and a
worker that were started in its place would wait for the same. Linux only: elsewhere no state is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

ENV_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


def choose_timeout(told: float | None, environ: Mapping[str, str]) -> float:
    """Return the seconds that were asked for, else those of the environment; 0, never: what is no number counts as
    none.

    >>> choose_timeout(None, {ENV_TIMEOUT: "5"}), choose_timeout(2.0, {ENV_TIMEOUT: "5"}), choose_timeout(None, {})
    (5.0, 2.0, 0.0)
    """
    try:
        return max(0.0, float(environ.get(ENV_TIMEOUT) or 0) if told is None else told)
    except ValueError:
        return 0.0


class KernelWatch:
    """Remembers since when each process has been held.

    >>> watch = KernelWatch(10.0)
    >>> [watch.held({7: state}, now) for state, now in (("D", 0.0), ("S", 5.0), ("D", 6.0), ("D", 15.0), ("D", 16.0))]
    [[], [], [], [], [7]]
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._since: dict[int, float] = {}

    @classmethod
    def chosen(cls, told: float | None) -> KernelWatch:
        return cls(choose_timeout(told, os.environ))

    def held(self, states: Mapping[int, str], now: float) -> list[int]:
        """Return which processes have been held for the whole timeout; ``states`` is the kernel's letter of each."""
        self._since = {pid: self._since.get(pid, now) for pid, state in states.items() if state == "D"}
        return [pid for pid, since in self._since.items() if now - since >= self.timeout]
