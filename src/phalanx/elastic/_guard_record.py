"""Remembers what a guard decides by: recent losses and norms, skipped steps, ways back. Values and pure functions.

The record is part of the job's state, so that a worker that joins, or a run that resumes, decides as the others do. It
takes no part in the digest: it never changes what a step computes. Only numbers of steps that were applied are in
it; they have the same bits on all workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx._fields import Fields

WARM_UP = 16
"""Steps that a median needs before anything is compared with it."""


@dataclass(frozen=True, kw_only=True)
class GuardRecord:
    """What happened so far."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    num_skipped: int = 0
    skips_in_row: int = 0
    clean_since: int = 0
    """The step after the last one that was skipped or led back."""
    rollbacks: int = 0
    """Without a window of sound steps in between."""

    def to_state(self) -> dict[str, Any]:
        return {**asdict(self), "losses": list(self.losses), "norms": list(self.norms)}

    @classmethod
    def from_state(cls, state: Any) -> GuardRecord:
        """Read it from a state; one that was saved by an earlier release has none."""
        if state is None:
            return cls()
        fields = Fields(state, "the guard's record")
        counts = ("num_skipped", "skips_in_row", "clean_since", "rollbacks")
        numbers = {name: fields.integer(name) for name in counts}
        return cls(losses=tuple(fields.items("losses")), norms=tuple(fields.items("norms")), **numbers)


def after_update(record: GuardRecord, step: int, loss: float | None, norm: float | None, window: int) -> GuardRecord:
    """Return the record after a step that was applied; ``window`` steps are remembered (0: none).

    >>> after_update(GuardRecord(losses=(1.0, 2.0), skips_in_row=2), 7, 3.0, None, window=2)
    GuardRecord(losses=(2.0, 3.0), norms=(), num_skipped=0, skips_in_row=0, clean_since=0, rollbacks=0)
    """
    if not window and not record.skips_in_row and not record.rollbacks:
        return record  # nothing to remember: the usual case, in every step
    return replace(
        record,
        losses=_with(record.losses, loss, window),
        norms=_with(record.norms, norm, window),
        skips_in_row=0,
        rollbacks=record.rollbacks if step + 1 - record.clean_since < window else 0,
    )


def after_skip(record: GuardRecord, step: int) -> GuardRecord:
    """Return the record after a step that was committed without its update."""
    return replace(
        record,
        num_skipped=record.num_skipped + 1,
        skips_in_row=record.skips_in_row + 1,
        clean_since=step + 1,
    )


def after_rollback(record: GuardRecord, saved: GuardRecord, step: int) -> GuardRecord:
    """Return the record after the way back from ``step`` to a save that had the record ``saved``.

    >>> after_rollback(GuardRecord(rollbacks=1), GuardRecord(losses=(0.5,)), step=57)
    GuardRecord(losses=(0.5,), norms=(), num_skipped=0, skips_in_row=0, clean_since=58, rollbacks=2)
    """
    return replace(
        saved,
        num_skipped=record.num_skipped,
        skips_in_row=0,
        clean_since=step + 1,
        rollbacks=record.rollbacks + 1,
    )


def find_spike(record: GuardRecord, factor: float, loss: float | None, norm: float | None) -> str:
    """Return what is more than ``factor`` times the running median, in words; empty if nothing is.

    A median that is not positive is no measure: losses may be negative.

    >>> find_spike(GuardRecord(losses=(0.5,) * 20), 10.0, 8.0, None)
    'the loss is 8, which is 16 times the median of the last 20 steps (0.5)'
    """
    for what, value, before in (("the loss", loss, record.losses), ("the gradient's norm", norm, record.norms)):
        if value is None or len(before) < WARM_UP:
            continue
        median = median_of(before)
        if median > 0 and value > factor * median:
            times = f"{value / median:.3g} times the median of the last {len(before)} steps ({median:.4g})"
            return f"{what} is {value:.4g}, which is {times}"
    return ""


def median_of(values: Sequence[float]) -> float:
    """Return the middle one, of an even number the lower of the two: no rounding, so the same everywhere."""
    return sorted(values)[(len(values) - 1) // 2]


def _with(values: tuple[float, ...], value: float | None, window: int) -> tuple[float, ...]:
    if value is None or not math.isfinite(value) or window < 1:
        return values
    return (*values, value)[-window:]
