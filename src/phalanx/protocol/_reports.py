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
    times: tuple[int, ...] = ()
    """Microseconds that a step takes it, lately: computation, waiting for others, waiting for data."""
    slots: int = -1
    """How many it carries; -1: it does not say."""


@dataclass(frozen=True, kw_only=True)
class WorkPosition(StoreRecord):
    """What a worker computes just now, in a file beside its error file: it is there however the worker dies.

    >>> WorkPosition(step=812, slot=5, samples="3, 17").describe()
    'step 812, slot 5, samples 3, 17'
    """

    what: ClassVar[str] = "position record"

    step: int
    slot: int = -1
    """-1: none, it is through with its slots."""
    samples: str = ""

    def describe(self) -> str:
        slot = f", slot {self.slot}" if self.slot >= 0 else ""
        return f"step {self.step}{slot}" + (f", samples {self.samples}" if self.samples else "")


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
class StopRequest(StoreRecord):
    """Asks every agent to stop its workers."""

    what: ClassVar[str] = "stop record"

    reason: str


@dataclass(frozen=True, kw_only=True)
class PageAddress(StoreRecord):
    """Where an agent shows the job: page, API, metrics, events."""

    what: ClassVar[str] = "page address"

    url: str
    host: str = ""
    is_local: bool = True
    """Whether only its own machine can reach it."""


@dataclass(frozen=True, kw_only=True)
class StacksRequest(StoreRecord):
    """Asks every agent to write its workers' stacks to the logs."""

    what: ClassVar[str] = "stacks record"

    reason: str
