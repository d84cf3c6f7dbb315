"""From ranges to copies: between a flat vector and the parts that ranks send, each rank's ranges laid end to end.

Owns ``Strided``, one two-dimensional copy, and the functions that make lists of them. *Packed* memory has one part of
``part`` elements for each rank, in the order of the ranks; in it the rank's ranges stand one after the other. Ranges of
one length at one distance become a single strided copy: with even rows that is one for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phalanx.fsdp.layout._unit_layout import Range, num_elements


@dataclass(frozen=True, slots=True)
class Strided:
    """``times`` runs of ``count`` elements: where the first begins on both sides, and how far apart they are."""

    flat: int
    packed: int
    count: int
    times: int = 1
    flat_stride: int = 0
    packed_stride: int = 0


def copies(ranges: Sequence[Sequence[Range]], part: int, begin: int, end: int, offset: int = 0) -> tuple[Strided, ...]:
    """Return what to copy between elements ``begin`` to ``end`` of the flat vector and the packed parts.

    ``flat`` of the result counts from ``begin``; each part begins with ``offset`` elements that are not copied.

    >>> copies([[(0, 4)], [(4, 8)]], part=10, begin=0, end=8)
    (Strided(flat=0, packed=0, count=4, times=2, flat_stride=4, packed_stride=10),)
    """
    return copies_at(ranges, [rank * part + offset for rank in range(len(ranges))], begin, end)


def copies_at(ranges: Sequence[Sequence[Range]], places: Sequence[int], begin: int, end: int) -> tuple[Strided, ...]:
    """Return the same for parts that begin at any ``places``.

    >>> copies_at([[(0, 4)], [(4, 8)]], [2, 16], begin=0, end=8)
    (Strided(flat=0, packed=2, count=4, times=2, flat_stride=4, packed_stride=14),)
    """
    by_rank = [run for at, each in zip(places, ranges, strict=True) for run in _runs(each, at, begin, end)]
    by_flat = sorted(by_rank, key=lambda run: run.flat)
    return min(_merged(by_rank), _merged(by_flat), key=len)


def _runs(ranges: Sequence[Range], at: int, begin: int, end: int) -> Iterable[Strided]:
    for start, stop in ranges:
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield Strided(first - begin, at + first - start, last - first)
        at += stop - start


def _merged(runs: Sequence[Strided]) -> tuple[Strided, ...]:
    """Join runs of one length that follow each other at one distance."""
    found: list[Strided] = []
    for run in runs:
        last = found[-1] if found else None
        if last is None or last.count != run.count:
            found.append(run)
        elif last.times == 1:
            strides = (run.flat - last.flat, run.packed - last.packed)
            if strides == (run.count, run.count):  # neighbours on both sides
                found[-1] = replace(last, count=2 * last.count)
            elif min(strides) >= 0:
                found[-1] = replace(last, times=2, flat_stride=strides[0], packed_stride=strides[1])
            else:
                found.append(run)
        elif (
            run.flat == last.flat + last.times * last.flat_stride
            and run.packed == last.packed + last.times * last.packed_stride
        ):
            found[-1] = replace(last, times=last.times + 1)
        else:
            found.append(run)
    return tuple(found)


def longest_part(ranges: Sequence[Sequence[Range]]) -> int:
    """Return how many elements the rank with the most has: the length of every packed part, so that they are even."""
    return max(map(num_elements, ranges))
