"""Knows up to which step all steps were committed, from the words of whoever was the first worker. Pure."""

from __future__ import annotations

from typing import Any

MAX_APART = 10_000


class CommittedRange:
    """Steps come nearly in order; a step may be told twice, and after a total loss come again.

    >>> steps = CommittedRange()
    >>> for step in (0, 1, 3, 2, 2):
    ...     steps.add(step)
    >>> steps.holds_to, steps.num_again
    (4, 1)
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.holds_to = 0
        self.num_again = 0
        self._apart: set[int] = set()

    def add(self, step: int) -> None:
        """Note a committed step."""
        if self.first is None:
            self.first = self.holds_to = step
        if step < self.holds_to or step in self._apart:
            self.num_again += 1
            return
        if len(self._apart) < MAX_APART:
            self._apart.add(step)
        while self.holds_to in self._apart:
            self._apart.remove(self.holds_to)
            self.holds_to += 1

    def to_record(self) -> dict[str, Any]:
        return {
            "first_step": self.first,
            "holds_to": self.holds_to,
            "gaps": bool(self._apart),
            "told_again": self.num_again,
        }
