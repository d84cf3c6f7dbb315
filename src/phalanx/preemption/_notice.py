"""Defines what a notice is, and what a source of notices has to offer. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Notice:
    """This machine is about to be taken away. ``at`` is when, in seconds since 1970, if that is known.

    >>> Notice(source="aws", reason="the instance will terminate", at=120.0).describe(now=0.0)
    'aws: the instance will terminate, in 120 s'
    """

    source: str
    reason: str
    at: float | None = None

    def describe(self, now: float) -> str:
        """Return it as a part of a sentence."""
        when = "" if self.at is None else f", in {max(0.0, self.at - now):.0f} s"
        return f"{self.source}: {self.reason}{when}"


class SourceProblem(Exception):
    """A source cannot be asked, or what it says makes no sense. That is no notice; the message says what was found."""


class NoticeSource(Protocol):
    """Says whether there is a notice."""

    @property
    def name(self) -> str: ...

    @property
    def interval(self) -> float:
        """Seconds between two looks."""

    def look(self, now: float) -> Notice | None:
        """Return the notice, if there is one. ``now`` is in seconds since 1970.

        Raises:
            SourceProblem: there is no telling.
        """
