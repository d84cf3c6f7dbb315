"""Checks whether boxes fill a tensor exactly, in time that grows with their number and not with its square.

A function on a grid with finite support is known by its mixed differences, which for a box are non-zero at its corners
only (plus where an even number of upper ends meet, minus else). So boxes tile the tensor if, and only if, their corners
cancel against those of the tensor. Where they do not, the first corner in lexicographic order is a point that is held
too often or not at all, since nothing before it is wrong. Corners are taken dim by dim, and what cancels in the dims
that are left (most does, in any layout that people make) goes no further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from phalanx.shard.layout._boxes import Box

Span = tuple[int, int]
Spans = tuple[Span, ...]

MAX_DIMS = 64
"""What torch's tensors can have."""
WORK_PER_BOX, LEAST_WORK = 64, 1_000_000


class Intricate(ValueError):
    """Boxes that no saved tensor has: to check it would take very long."""


def find_fault(boxes: Sequence[Box], sizes: Sequence[int]) -> tuple[tuple[int, ...], list[int]] | None:
    """Return a point of the tensor that is not held once, with the positions of the boxes that hold it; None if all
    are.

    Every box must lie inside a tensor of ``sizes``.

    >>> halves = [Box((0,), (2,)), Box((2,), (2,))]
    >>> find_fault(halves, [4]), find_fault(halves, [5]), find_fault([*halves, Box((1,), (1,))], [4])
    (None, ((4,), []), ((1,), [0, 2]))
    """
    terms: Counter[Spans] = Counter()
    for box in boxes:
        if box.volume:
            terms[tuple(zip(box.offsets, map(sum, zip(*box, strict=True)), strict=True))] += 1
    if prod(sizes):
        terms[tuple((0, size) for size in sizes)] -= 1
    point = _first(terms, [max(WORK_PER_BOX * len(boxes), LEAST_WORK)])
    if point is None:
        return None
    return point, [index for index, box in enumerate(boxes) if _holds(box, point)]


def _first(terms: Counter[Spans], work: list[int]) -> tuple[int, ...] | None:
    """Return the first corner, in lexicographic order, of a sum of boxes with signs that does not cancel."""
    terms = Counter({spans: count for spans, count in terms.items() if count})
    if not terms:
        return None
    work[0] -= len(terms)
    if work[0] < 0:
        raise Intricate("the shards are cut in so many ways that they cannot be checked in reasonable time")
    if not next(iter(terms)):
        return ()
    changes: dict[int, Counter[Spans]] = {}
    for ((begin, end), *rest), count in terms.items():
        inner = tuple(rest)
        changes.setdefault(begin, Counter())[inner] += count
        changes.setdefault(end, Counter())[inner] -= count
    for at in sorted(changes):
        found = _first(changes[at], work)
        if found is not None:
            return at, *found
    return None


def _holds(box: Box, point: Sequence[int]) -> bool:
    return all(begin <= at < begin + size for at, begin, size in zip(point, box.offsets, box.sizes, strict=True))
