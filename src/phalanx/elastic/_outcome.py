"""How a step ended on this worker."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """What ``Step.commit`` returns; true when the step is part of this worker's state.

    Code that follows a commit belongs under ``if step.commit():``. It then runs once per step on every worker that was
    there, also on one that took the step over from another.

    >>> [bool(outcome) for outcome in Outcome]
    [True, True, False]
    """

    APPLIED = "applied"
    """This worker made the update itself."""
    ADOPTED = "adopted"
    """A worker was lost when others had made the update and this one had not: it took over their state."""
    DROPPED = "dropped"
    """Nothing was applied anywhere; the loop gives the same step again."""

    def __bool__(self) -> bool:
        return self is not Outcome.DROPPED
