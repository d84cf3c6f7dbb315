"""Keeps what a step's micro-batches log, and makes means of it that are the same on all workers.

Owns the numbers by slot and their sums. They are added exactly, so a mean has the same bits however the slots are
spread over workers. When nothing was logged nothing is exchanged; the step knows that from its reduction.
"""

from __future__ import annotations

import math

from phalanx.comm import Group

Logged = dict[str, list[list[float]]]
"""By name: a value and its weight for each time that it was logged."""


class SlotLogs:
    """What the slots of one worker have logged in a step.

    >>> logs = SlotLogs()
    >>> for slot, loss in enumerate((1.0, 4.0)):
    ...     logs.add(slot, "loss", loss, weight=2.0 - slot)
    >>> logs.gather(None)
    {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._logged: Logged = {}

    def add(self, slot: int, name: str, value: float, weight: float) -> None:
        """Keep one number. A weight of 0 leaves the value out, whatever it is."""
        if weight < 0 or not math.isfinite(weight):
            raise ValueError(f"log: {name!r} has weight {weight} in slot {slot}; expected a finite number, at least 0")
        if weight:
            self._logged.setdefault(name, []).append([value, weight])

    def gather(self, group: Group | None) -> dict[str, float]:
        """Return the means over the slots of all workers, by name. Raises as collectives do."""
        told = [self._logged] if group is None else group.all_gather_values(self._logged)
        names = sorted({name for one in told for name in one})
        return {name: _mean([pair for one in told for pair in one.get(name, [])]) for name in names}


def _mean(pairs: list[list[float]]) -> float:
    products = [value * weight for value, weight in pairs]
    if not all(map(math.isfinite, products)):
        return sum(products) / sum(weight for _, weight in pairs)  # inf or nan, in any order
    return math.fsum(products) / math.fsum(weight for _, weight in pairs)
