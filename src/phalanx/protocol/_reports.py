"""Defines the records by which workers tell agents of progress, lost contact and steps that are computed again.

Contact that is lost while nobody dies only workers can see: each writes ``contact_key(g, worker_id)``, then
``any_contact_key(g)``, and the agents decide who, if anybody, is replaced (``phalanx.launch.recovery._contact``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phalanx.protocol._codec import StoreRecord, at_least, required


@dataclass(frozen=True, kw_only=True)
class ProgressReport(StoreRecord):
    """How far a worker is. A record that differs from the one before says that the worker lives."""

    what: ClassVar[str] = "progress record"

    step: int = -1
    """Counts over the whole job; -1: before the first."""
    count: int = -1
    """How often the worker reported since it has its place in a group; -1: it does not count."""
    waits: int = 0
    """Changes as long as the worker only waits for others."""


@dataclass(frozen=True, kw_only=True)
class LostContact(StoreRecord):
    """One worker's word that it lost contact with others, in a group of ``peers`` (itself included)."""

    what: ClassVar[str] = "lost contact record"

    by: str
    reason: str
    of: tuple[str, ...] = required(())
    """Those whom it could not reach, as far as it knows."""
    late: bool = required(False)
    """Whether it waited for the whole timeout of the group; else a connection ended."""
    peers: tuple[str, ...] = required(())
    step: int = -1
    """How many steps it has committed."""


@dataclass(frozen=True, kw_only=True)
class Setbacks(StoreRecord):
    """How often all workers were lost and the job went back, how many steps were computed again for it, and the
    last time from which step to which."""

    what: ClassVar[str] = "setbacks record"

    count: int = at_least(0, default=0)
    num_steps: int = at_least(0, default=0)
    last_from: int = at_least(0, default=0)
    last_to: int = at_least(0, default=0)

    def plus(self, before: int, after: int) -> Setbacks:
        """Return one more, from step ``before`` to step ``after``.

        >>> Setbacks().plus(57, 50)
        Setbacks(count=1, num_steps=7, last_from=57, last_to=50)
        """
        return Setbacks(
            count=self.count + 1,
            num_steps=self.num_steps + before - after,
            last_from=before,
            last_to=after,
        )


@dataclass(frozen=True, kw_only=True)
class StacksRequest(StoreRecord):
    """Asks every agent to write its workers' stacks to the logs."""

    what: ClassVar[str] = "stacks record"

    reason: str
