"""Holds what ``phalanx doctor`` finds: values and the words around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEVELS = ("ok", "warn", "bad")


@dataclass(frozen=True)
class Finding:
    """Holds one thing that was found; ``level`` is ok, warn or bad."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:4}  {self.text}"


def worst_of(findings: Sequence[Finding]) -> str:
    """Return the worst level of them.

    >>> worst_of([Finding("ok", ""), Finding("warn", "")]), worst_of([])
    ('warn', 'ok')
    """
    return max((finding.level for finding in findings), key=_LEVELS.index, default="ok")


def closing_words(worst: str) -> str:
    return {
        "ok": "\nAll is well.",
        "warn": "\nIt will work; see warn.",
        "bad": "\nSomething is wrong; see bad.",
    }[worst]
