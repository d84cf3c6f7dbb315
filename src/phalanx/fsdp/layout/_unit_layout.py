"""UnitLayout: which ranges of a unit's flat vector each rank holds.

A unit is a flat vector: its parameters in row-major order, one after the other, each beginning at a multiple of
``ALIGNMENT`` elements (what lies between belongs to nobody). A layout says which ranges of it each rank holds, nothing
more; storage, gather, reduce, digest and save work on ranges only and do not ask how they came about. Two makers are
here: ``rows`` (what ``Shard(0)`` or ``Shard(dim)`` gives each rank of every parameter) and ``cells`` (fixed aligned
pieces of the whole vector with one or more holders each).

Invariants: the ranges of a rank ascend and do not touch; every element of a parameter is owned by exactly one rank,
which holds it; others may hold copies of it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from phalanx.tensor.layout._placement import chunk_sizes, chunk_starts

ALIGNMENT = 64
Range = tuple[int, int]
"""Elements from the first number to before the second."""


@dataclass(frozen=True)
class UnitLayout:
    """Ranges of a flat vector of ``length`` elements by rank: all that it holds, and those that it owns.

    >>> layout = cells(256, [[0, 1], [1, 0], [0, 1], [1, 0]])
    >>> layout.held[0], layout.owned[0]
    (((0, 256),), ((0, 64), (128, 192)))
    """

    length: int
    held: tuple[tuple[Range, ...], ...]
    owned: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        if len(self.held) != len(self.owned) or not self.held:
            raise ValueError(
                f"a layout of {len(self.held)} holders and {len(self.owned)} owners; expected one per rank"
            )
        for rank, ranges in enumerate(self.held):
            _check_ascending(rank, ranges, self.length)
            if intersect(ranges, self.owned[rank]) != self.owned[rank]:
                raise ValueError(f"rank {rank} owns {self.owned[rank]} but holds only {ranges}")
        flat = sorted(piece for ranges in self.owned for piece in ranges)
        for (_, stop), (start, _) in pairwise(flat):
            if start < stop:
                raise ValueError(f"two ranks own element {start} of the flat vector; expected one owner for each")

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    @cached_property
    def num_held(self) -> tuple[int, ...]:
        """How many elements each rank holds."""
        return tuple(num_elements(ranges) for ranges in self.held)

    @cached_property
    def num_owned(self) -> tuple[int, ...]:
        return tuple(num_elements(ranges) for ranges in self.owned)

    @cached_property
    def has_copies(self) -> bool:
        return self.held != self.owned

    def restricted(self, ranges: Sequence[Range]) -> UnitLayout:
        """Return the same holders of these ranges only (ascending)."""
        wanted = tuple(ranges)
        return UnitLayout(
            self.length,
            tuple(intersect(held, wanted) for held in self.held),
            tuple(intersect(owned, wanted) for owned in self.owned),
        )

    def local_span(self, rank: int, begin: int, end: int) -> Range:
        """Say where the elements from ``begin`` to ``end`` lie in what ``rank`` holds, its ranges laid end to end."""
        return (_position(self.held[rank], begin), _position(self.held[rank], end))


def num_elements(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ascending ranges with neighbours joined and empty ones left out.

    >>> joined([(0, 4), (4, 6), (7, 7), (8, 9)])
    ((0, 6), (8, 9))
    """
    found: list[Range] = []
    for start, stop in ranges:
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def intersect(one: Sequence[Range], other: Sequence[Range]) -> tuple[Range, ...]:
    """Return what two ascending lists of ranges have in common; pieces end where either's do.

    >>> intersect([(0, 10)], [(2, 4), (8, 12)])
    ((2, 4), (8, 10))
    """
    found: list[Range] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def aligned(count: int, alignment: int = ALIGNMENT) -> int:
    return -(-count // alignment) * alignment


def flat_starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Say where each parameter of ``sizes`` elements begins in the flat vector; the last number is its length.

    >>> flat_starts([10, 64, 1])
    (0, 64, 128, 192)
    """
    return tuple(accumulate((aligned(size) for size in sizes), initial=0))


def rows(shapes: Sequence[Sequence[int]], num_ranks: int, dims: Sequence[int] | None = None) -> UnitLayout:
    """Cut dim ``dims[i]`` (default 0) of every parameter into ``num_ranks`` chunks, as ``Shard`` does.

    >>> rows([(5, 2)], 3).held
    (((0, 4),), ((4, 8),), ((8, 10),))
    """
    cut = [0] * len(shapes) if dims is None else dims
    starts = flat_starts([math.prod(shape) for shape in shapes])
    held: list[tuple[Range, ...]] = []
    for rank in range(num_ranks):
        pieces: list[Range] = []
        for start, shape, dim in zip(starts, shapes, cut, strict=False):
            pieces += ((start + a, start + b) for a, b in _rows_of(shape, dim, num_ranks, rank))
        held.append(joined(pieces))
    return UnitLayout(starts[-1], tuple(held), tuple(held))


def _rows_of(shape: Sequence[int], dim: int, num_ranks: int, rank: int) -> list[Range]:
    """Return the ranges of the flattened tensor that ``rank`` holds if ``dim`` is cut."""
    outer, length, inner = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    start, size = chunk_starts(length, num_ranks)[rank], chunk_sizes(length, num_ranks)[rank]
    if not size or not inner:
        return []
    return [((i * length + start) * inner, (i * length + start + size) * inner) for i in range(outer)]


def cells(length: int, holders: Sequence[Sequence[int]], num_ranks: int | None = None) -> UnitLayout:
    """Cut the vector into ``len(holders)`` aligned cells, cell i held by the ranks ``holders[i]``, owned by the first.

    >>> cells(200, [[0], [1]]).held
    (((0, 128),), ((128, 200),))
    """
    count = len(holders)
    if not count or not all(holders):
        raise ValueError(f"cells of {list(holders)}; expected at least one holder for each of at least one cell")
    width = max(ALIGNMENT, aligned(-(-length // count)))
    ranks = max(max(each) for each in holders) + 1 if num_ranks is None else num_ranks
    held: list[list[Range]] = [[] for _ in range(ranks)]
    owned: list[list[Range]] = [[] for _ in range(ranks)]
    for number, each in enumerate(holders):
        if len(set(each)) != len(each) or not all(0 <= rank < ranks for rank in each):
            raise ValueError(f"cell {number} is held by ranks {list(each)}; expected distinct ranks in [0, {ranks})")
        cell = (min(length, number * width), min(length, (number + 1) * width))
        owned[each[0]].append(cell)
        for rank in each:
            held[rank].append(cell)
    return UnitLayout(length, tuple(map(joined, held)), tuple(map(joined, owned)))


def _check_ascending(rank: int, ranges: Sequence[Range], length: int) -> None:
    last = 0
    for start, stop in ranges:
        if not last <= start < stop <= length:
            raise ValueError(
                f"rank {rank} holds {list(ranges)} of a vector of {length} elements; expected ascending ranges in it "
                f"that are not empty and do not overlap"
            )
        last = stop


def _position(ranges: Sequence[Range], element: int) -> int:
    """Return how many elements of ``ranges`` come before ``element``."""
    index = bisect_right(ranges, (element, -1))
    before = num_elements(ranges[:index])
    return before if not index else before - max(0, ranges[index - 1][1] - element)
