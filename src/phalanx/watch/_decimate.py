"""Keeps long series small: when there are too many buckets, pairs of neighbours become one. Pure.

A series of any length costs a bounded amount of memory and of work to show; a value costs the same whenever it comes.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any

MAX_POINTS = 600
"""Buckets of a curve: more than a screen has room for."""
RECENT = 8
"""Buckets that count as lately."""
MAX_COLUMNS = 240
"""Buckets of steps in the heat map."""


@dataclass
class CurveBucket:
    """Some steps that were committed one after the other."""

    begin: float
    """When the step before the first of them was committed (or, of the very first, that one)."""
    end: float
    first: int
    last: int
    num: int
    samples: int
    loss_sum: float
    losses: int
    low: float
    high: float

    def join(self, later: CurveBucket) -> None:
        self.end, self.last = later.end, later.last
        self.num += later.num
        self.samples += later.samples
        self.loss_sum += later.loss_sum
        self.losses += later.losses
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)

    def row(self) -> list[Any]:
        """Return time, first and last step, mean, least and largest loss, samples per second."""
        has = self.losses > 0
        seconds = self.end - self.begin
        return [
            round(self.end, 3),
            self.first,
            self.last,
            _short(self.loss_sum / self.losses) if has else None,
            _short(self.low) if has else None,
            _short(self.high) if has else None,
            _short(self.samples / seconds) if seconds > 0 else None,
        ]


class Curve:
    """Loss and throughput over the commits of a job, in the order in which they came.

    >>> curve = Curve(max_points=4)
    >>> for step in range(9):
    ...     curve.add(float(step), step, 1.0, 8)
    >>> [row[1:3] for row in curve.rows()]
    [[0, 3], [4, 7], [8, 8]]
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max = max_points
        self._width = 1
        self._buckets: list[CurveBucket] = []
        self._last = 0.0
        self._first_samples = 0
        """Of the very first step."""

    def add(self, time: float, step: int, loss: float | None, samples: int) -> None:
        """Add a committed step."""
        given = loss is not None and math.isfinite(loss)
        value = loss if loss is not None and given else 0.0
        last = self._buckets[-1] if self._buckets else None
        if last is None:
            self._first_samples = samples
        if last is not None and last.num < self._width:  # what joining a bucket of this step alone would give
            last.end, last.last, self._last = time, step, time
            last.num += 1
            last.samples += samples
            if given:
                last.loss_sum += value
                last.losses += 1
                last.low, last.high = min(last.low, value), max(last.high, value)
            return
        new = CurveBucket(
            begin=self._last or time,
            end=time,
            first=step,
            last=step,
            num=1,
            samples=samples,
            loss_sum=value,
            losses=int(given),
            low=value if given else math.inf,
            high=value if given else -math.inf,
        )
        self._last = time
        self._buckets.append(new)
        if len(self._buckets) > self._max:
            for one, other in zip(self._buckets[::2], self._buckets[1::2], strict=False):
                one.join(other)
            self._buckets = self._buckets[::2]
            self._width *= 2

    def rows(self) -> list[list[Any]]:
        """Return the buckets as rows; see ``CurveBucket.row``."""
        return [bucket.row() for bucket in self._buckets]

    def rate(self) -> float | None:
        """Return samples per second, lately."""
        seconds, _, samples = self._lately()
        return samples / seconds if seconds > 0 else None

    def step_seconds(self) -> float | None:
        """Return seconds per step, lately."""
        seconds, steps, _ = self._lately()
        return seconds / steps if seconds > 0 else None

    def _lately(self) -> tuple[float, int, int]:
        """Return the time that the last buckets took, their steps and samples; of the very first step nobody knows when
        it began."""
        recent = self._buckets[-RECENT:]
        if not recent:
            return 0.0, 0, 0
        seconds = recent[-1].end - recent[0].begin
        steps, samples = sum(bucket.num for bucket in recent), sum(bucket.samples for bucket in recent)
        if len(self._buckets) <= RECENT:
            return seconds, steps - 1, samples - self._first_samples
        return seconds, steps, samples


class HeatMap:
    """Own time of each worker by step, in columns of equal width that all workers share.

    >>> heat = HeatMap(max_columns=2)
    >>> heat.add("w", 0, [1000, 1000, 3000, 3000, 5000])
    >>> heat.width, heat.cells("w")
    (4, [2000.0, 5000.0])
    """

    def __init__(self, max_columns: int = MAX_COLUMNS) -> None:
        self._max = max_columns
        self.width = 1
        self._rows: dict[str, tuple[list[int], list[int]]] = {}

    def add(self, worker: str, step: int, micros: list[int]) -> None:
        """Add the times of steps that follow one another."""
        last = step + len(micros) - 1
        while last // self.width >= self._max:
            self._widen()
        sums, counts = self._rows.setdefault(worker, ([], []))
        missing = last // self.width + 1 - len(sums)
        if missing > 0:
            sums += [0] * missing
            counts += [0] * missing
        if self.width >= len(micros) and step // self.width == last // self.width:
            sums[step // self.width] += sum(micros)
            counts[step // self.width] += len(micros)
            return
        for number, value in enumerate(micros, step):
            sums[number // self.width] += value
            counts[number // self.width] += 1

    def _widen(self) -> None:
        self.width *= 2
        for worker, row in self._rows.items():
            self._rows[worker] = tuple(  # type: ignore[assignment]  # of two
                [sum(pair) for pair in zip(one[::2], [*one[1::2], 0], strict=False)] for one in row
            )

    def cells(self, worker: str) -> list[float | None]:
        """Return the mean time of each column, in microseconds; None where the worker told nothing."""
        sums, counts = self._rows.get(worker, ([], []))
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    def to_record(self) -> dict[str, Any]:
        """Return it for JSON: a byte for each cell (0: nothing, 1 to 255 from ``low`` to ``high`` seconds)."""
        rows = {worker: self.cells(worker) for worker in self._rows}
        known = sorted(cell for cells in rows.values() for cell in cells if cell is not None)
        low = known[len(known) // 50] if known else 0.0
        high = known[-1 - len(known) // 200] if known else 0.0
        scale = 254 / (high - low) if high > low else 0.0
        return {
            "width": self.width,
            "low": low / 1e6,
            "high": high / 1e6,
            "rows": {worker: _bytes(cells, low, scale) for worker, cells in rows.items()},
        }


def _bytes(cells: list[float | None], low: float, scale: float) -> str:
    high = low + 254 / scale if scale else low
    levels = [
        0 if cell is None else 1 if cell <= low else 255 if cell >= high else 1 + int((cell - low) * scale)
        for cell in cells
    ]
    return base64.b64encode(bytes(levels)).decode()


def _short(value: float) -> float:
    """
    >>> _short(0.123456789)
    0.123457
    """
    return float(f"{value:.6g}")
