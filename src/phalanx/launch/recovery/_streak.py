"""Deaths in a row with nothing gained in between: when replacing the dead is no cure any more. Pure.

Owns ``Death`` (what counts about one), ``Streak`` (which travels from recovery to recovery, so that all agents count
alike) and the limits. A death counts only if it is that of a worker which was started after the last one that counted:
workers that die of the same cause one after the other, over several generations, are one wave.
Progress is the furthest step that any worker of the job has reported: going back to a save and dying at the same step
again is none. Where no worker reports steps, a long life is taken for progress.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MAX_ERRORS = 3
"""Replacements in a row that may die of an error of their own."""

MAX_KILLS = 10
"""Replacements in a row that may be killed: by a person, the cluster, or the kernel for want of memory."""

LONG_LIFE = 600.0
"""Seconds after which a worker of a script that reports no steps has got somewhere."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """What matters about a worker that failed."""

    generation: int
    born: int
    """The generation that it was started for."""
    step: int = -1
    """The furthest step that any worker of the generation has reported; -1: none ever did."""
    took_part: bool = False
    """Whether it has reported a step itself."""
    is_killed: bool = False
    """Whether the cause lies outside: a signal that others send, or a peer that went away."""
    lived: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Streak:
    """The deaths so far.

    >>> streak = Streak()
    >>> for generation in range(4):
    ...     streak = streak.after(Death(generation=generation, born=generation))
    >>> streak.errors, streak.is_loop
    (4, True)
    >>> streak.after(Death(generation=4, born=4, step=7, took_part=True)).is_loop
    False
    """

    errors: int = 0
    kills: int = 0
    generation: int = -1
    """Of the last death that counted."""
    begin: int = -1
    """The furthest step when it began."""
    step: int = -1
    """The furthest step now."""

    def after(self, death: Death) -> Streak:
        """The streak with one more death."""
        is_silent = max(self.step, death.step) < 0
        has_gained = death.lived >= LONG_LIFE if is_silent else death.took_part and death.step > self.step
        step = max(self.step, death.step)
        if has_gained or not self.errors + self.kills:
            kept = Streak(begin=step)
        elif death.born > self.generation:
            kept = self
        else:
            return self
        return Streak(
            errors=kept.errors + (not death.is_killed),
            kills=kept.kills + death.is_killed,
            generation=death.generation,
            begin=kept.begin,
            step=step,
        )

    @property
    def is_loop(self) -> bool:
        """Whether the next replacement would fare no better. The first death is nobody's replacement."""
        return self.errors > MAX_ERRORS or self.kills > MAX_KILLS

    @property
    def others_go_on(self) -> bool:
        """Whether the job made steps meanwhile: then only the replacements are in trouble."""
        return self.step > self.begin

    def describe(self) -> str:
        count = self.errors + self.kills - 1
        return f"{count} replacements in a row died without a step of their own"

    def to_record(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> Streak:
        """``ValueError`` when it is none."""
        if not isinstance(record, dict) or record.keys() != cls().to_record().keys():
            raise ValueError(f"{record!r} is no record of deaths in a row")
        if not all(type(value) is int for value in record.values()):
            raise ValueError(f"{record!r} has a value that is no whole number")
        return cls(**record)
