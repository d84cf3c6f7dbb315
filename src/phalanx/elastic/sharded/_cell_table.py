"""Cuts the sections of a model's units into cells: the ranges that workers hold, move, save and digest.

A pure function of the parameters' sizes and the kind of optimizer, never of the workers. A section is one flat vector
(``fsdp.layout._unit_layout``): its parameters one after the other, each at a multiple of 64 elements; what lies
between two parameters goes with the first. Element-wise optimizers: up to ``NUM_CELLS`` cells of about one size, which
begin at a parameter or at a multiple of ``BLOCK`` elements of one, so a block of the norm never lies in two cells.
Optimizers of matrices (Muon, Adafactor): cells begin at parameters only, small neighbours packed together.

Invariants: the cells of a section ascend, are not empty and cover it; a cell's index in the table is its name
everywhere.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from phalanx.elastic.reduce._norm_blocks import BLOCK
from phalanx.fsdp.layout._unit_layout import flat_starts

NUM_CELLS = 64
"""Of a section, at most."""


@dataclass(frozen=True)
class SectionShape:
    """One section of a unit: the number of elements of each parameter, in order, and the bytes of an element."""

    sizes: tuple[int, ...]
    itemsize: int = 4


@dataclass(frozen=True)
class Cell:
    """Elements ``begin`` to before ``end`` of the flat vector of a unit's section; ``number`` counts within it."""

    unit: int
    section: int
    number: int
    begin: int
    end: int
    itemsize: int = 4

    @property
    def size(self) -> int:
        """Bytes of the parameters in it; the optimizer's state is in proportion."""
        return (self.end - self.begin) * self.itemsize


@dataclass(frozen=True)
class CellTable:
    """All cells of a model, by units, sections and places."""

    cells: tuple[Cell, ...]

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each cell."""
        return tuple(cell.size for cell in self.cells)

    @cached_property
    def of_section(self) -> dict[tuple[int, int], range]:
        """Indices of the cells of each (unit, section)."""
        found: dict[tuple[int, int], range] = {}
        for index, cell in enumerate(self.cells):
            key = (cell.unit, cell.section)
            found[key] = range(found[key].start if key in found else index, index + 1)
        return found

    def fingerprint(self) -> str:
        """Return what two workers or a save and a worker compare to know that they mean the same cells."""
        return hashlib.sha256(repr(self.cells).encode()).hexdigest()


def cell_table(
    units: Sequence[Sequence[SectionShape]], *, whole_matrices: bool, num_cells: int = NUM_CELLS
) -> CellTable:
    """Cut every section of every unit.

    >>> table = cell_table([[SectionShape((3000, 10))]], whole_matrices=False)
    >>> [(cell.begin, cell.end) for cell in table.cells]
    [(0, 1024), (1024, 2048), (2048, 3008), (3008, 3072)]
    >>> [(cell.begin, cell.end) for cell in cell_table([[SectionShape((3000, 10))]], whole_matrices=True).cells]
    [(0, 3008), (3008, 3072)]
    """
    if num_cells < 1:
        raise ValueError(f"num_cells is {num_cells}; expected at least 1")
    cells = [
        Cell(unit, section, number, begin, end, shape.itemsize)
        for unit, shapes in enumerate(units)
        for section, shape in enumerate(shapes)
        for number, (begin, end) in enumerate(_ranges(shape.sizes, whole_matrices, num_cells))
    ]
    return CellTable(tuple(cells))


def _ranges(sizes: Sequence[int], whole_matrices: bool, num_cells: int) -> list[tuple[int, int]]:
    starts = flat_starts(sizes)
    if not starts[-1]:
        return []
    step = max(1, max(sizes)) if whole_matrices else BLOCK
    allowed = [start + at for start, size in zip(starts, sizes, strict=False) for at in range(0, size, step)]
    begins = sorted({_nearest(allowed, starts[-1] * i // num_cells) for i in range(num_cells)})
    return list(pairwise([*begins, starts[-1]]))


def _nearest(places: Sequence[int], wanted: int) -> int:
    """Return the ascending place that is nearest, the earlier one of two."""
    after = bisect_left(places, wanted)
    around = places[max(0, after - 1) : after + 1]
    return min(around, key=lambda place: (abs(place - wanted), place))
