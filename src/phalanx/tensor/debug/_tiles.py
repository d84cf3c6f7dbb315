"""Which rank holds which rectangle of a tensor: what all pictures of a layout are drawn from.

Owns ``Tile``, ``tiles`` and ``layout_of``. Pure: a layout is known to every rank, so nothing is communicated.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.layout._placement import indices_of
from phalanx.tensor.layout._spec import Spec

Range = tuple[int, int]  # half-open


class Tile(NamedTuple):
    """A rectangle of the tensor and the ranks that hold it."""

    rows: Range
    columns: Range
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        return ", ".join(map(str, self.ranks))


def layout_of(dtensor: DTensor) -> Spec:
    """Return the layout to be drawn; an error for what has none."""
    if not isinstance(dtensor, DTensor):
        shape = f" of shape {tuple(dtensor.shape)}" if isinstance(dtensor, Tensor) else ""
        raise TypeError(
            f"a picture of a layout needs a DTensor, got a {type(dtensor).__name__}{shape}: distribute_tensor makes one"
        )
    return dtensor._spec


def tiles(spec: Spec) -> list[Tile]:
    """Return the rectangles of a tensor of one or two dims (one dim: a single row), top to bottom, left to right.

    A rank has several where a strided shard gives it several ranges, and none where its shard is empty.
    """
    if len(spec.shape) not in (1, 2):
        raise ValueError(f"a picture needs one or two dims, not the shape {tuple(spec.shape)}: select or flatten first")
    held: dict[tuple[Range, Range], list[int]] = {}
    for coordinate in itertools.product(*map(range, spec.mesh.shape)):
        ranges = [_runs(indices_of(n, spec.shards(dim, coordinate))) for dim, n in enumerate(spec.shape)]
        rows, columns = ([(0, 1)], ranges[0]) if len(ranges) == 1 else ranges
        for area in itertools.product(rows, columns):
            held.setdefault(area, []).append(int(spec.mesh.mesh[coordinate]))
    return [Tile(rows, columns, tuple(sorted(ranks))) for (rows, columns), ranks in sorted(held.items())]


def _runs(indices: list[int]) -> list[Range]:
    """Consecutive indices as ranges.

    >>> _runs([0, 1, 4, 5, 6])
    [(0, 2), (4, 7)]
    """
    runs: list[Range] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
