"""Tells slow workers from those that wait: what each spends on a step, beside the median of all.

Owns the last steps that each worker told of, and ``compare``, which puts workers side by side. A worker whose
computation takes longer than the others' is slow; one whose data does waits for its loader; one whose waiting does
only waits for a slow one. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from phalanx.events._event_types import WorkerStepTimes

STEPS = 64
"""Steps of a worker that count."""
PARTS_OF_STEP = ("compute", "wait", "data")
SLOW = 1.25
"""How many times the median makes a worker worth a word."""
SHARE = 0.1
"""Of a step; a part that takes less of it than this is no reason for anything."""


def compare(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return for each worker what it spends on a step (compute, wait, data) and how many times the median that is.

    >>> rows = compare({"a": (0.2, 0.0, 0.0), "b": (0.1, 0.1, 0.0), "c": (0.1, 0.1, 0.0)})
    >>> rows["a"]["relative"]["compute"], rows["a"]["is"], rows["b"]["is"]
    (2.0, 'slow', '')
    """
    middle = [median(column) for column in zip(*seconds.values(), strict=True)]
    whole = sum(middle)
    found = {}
    for worker, parts in seconds.items():
        times = {name: round(value, 6) for name, value in zip(PARTS_OF_STEP, parts, strict=True)}
        relative = {
            name: round(value / of, 3) if of > 0 else None
            for name, value, of in zip(PARTS_OF_STEP, parts, middle, strict=True)
        }
        found[worker] = {"seconds": times, "relative": relative, "is": _judge(parts, middle, whole)}
    return found


def _judge(parts: Sequence[float], middle: Sequence[float], whole: float) -> str:
    (compute, _, data), (usual_compute, _, usual_data) = parts, middle
    if compute > SLOW * usual_compute and compute - usual_compute > SHARE * whole:
        return "slow"
    if data > SLOW * usual_data and data - usual_data > SHARE * whole:
        return "waits for data"
    return ""


def in_words(row: Mapping[str, Any]) -> str:
    """Return a worker's row for people.

    >>> in_words(compare({"a": (0.2, 0.0, 0.0), "b": (0.1, 0.1, 0.0), "c": (0.1, 0.1, 0.0)})["a"])
    'compute 200 ms (2.00x), wait 0 ms (0.00x), data 0 ms: slow'
    """
    words = []
    for name, seconds in row["seconds"].items():
        of = row["relative"][name]
        words.append(f"{name} {1e3 * seconds:.3g} ms" + ("" if of is None else f" ({of:.2f}x)"))
    return ", ".join(words) + (f": {row['is']}" if row["is"] else "")


class Paces:
    """The last steps of each worker."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[int, int, int]]] = {}

    def take(self, event: WorkerStepTimes) -> None:
        """Note what a worker told of its steps."""
        steps = self._steps.setdefault(event.worker, deque(maxlen=STEPS))
        steps.extend(zip(event.compute, event.wait, event.data, strict=False))

    def rows(self, members: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return a row for each of these workers that has told of steps; of others nothing is kept."""
        self._steps = {worker: steps for worker, steps in self._steps.items() if worker in members}
        known = {worker: self._steps[worker] for worker in members if self._steps.get(worker)}
        return compare({w: [median(column) / 1e6 for column in zip(*s, strict=True)] for w, s in known.items()})
