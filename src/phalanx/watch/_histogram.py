"""Counts values by size, as Prometheus does: cumulative buckets, their sum, their number."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REGROUP_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """
    >>> times = Histogram((0.1, 1.0))
    >>> for seconds in (0.05, 0.1, 7.0):
    ...     times.add(seconds)
    >>> list(times.cumulative()), times.num
    ([('0.1', 2), ('1', 2), ('+Inf', 3)], 3)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.num = 0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value
        self.num += 1

    def add_many(self, values: list[float]) -> None:
        """Count values."""
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)
        self.num += len(values)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bound of each bucket but the last, which has none."""
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values are in each bucket."""
        return tuple(self._counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each upper bound, as text, with how many values were not larger."""
        count = 0
        for bound, here in zip((*self._bounds, float("inf")), self._counts, strict=True):
            count += here
            yield ("+Inf" if bound == float("inf") else f"{bound:g}"), count
