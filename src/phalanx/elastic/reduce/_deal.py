"""Deals slots out by how fast workers are: a slow one gets fewer, and no bit of the result changes.

Pure values only. ``deal`` finds the sizes with which the slowest worker is done soonest; ``better_deal`` says whether
they are worth a change. Ranges are contiguous, in the order of ranks, so slot 0 stays with rank 0.

Invariants: every slot is dealt once; who is faster never gets less; a worker that gets faster never loses a slot to it;
where there are enough slots everybody has one, so that everybody goes on being measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from phalanx.elastic.reduce._slots import slot_range

MIN_GAIN = 0.1
"""Share of the time of a step's slots that another deal has to save. Below it, noise would move slots back and forth,
and ranges that cut the slot tree in more places send more."""

MIN_SECONDS = 0.01
"""What it has to save in seconds: the times of shorter steps say more about the machine's scheduler than its speed."""


def even_deal(num_slots: int, size: int) -> tuple[int, ...]:
    """Return the sizes with which a round begins.

    >>> even_deal(8, 3)
    (2, 3, 3)
    """
    return tuple(len(slot_range(num_slots, size, rank)) for rank in range(size))


def ranges_of(sizes: Sequence[int]) -> list[range]:
    """Return each worker's slots.

    >>> ranges_of((2, 0, 3))
    [range(0, 2), range(2, 2), range(2, 5)]
    """
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def deal(num_slots: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the sizes with which the last worker is done soonest; ``seconds`` is what a slot takes on each worker.

    >>> deal(28, [1.0, 1.0, 1.0, 2.0])
    (8, 8, 8, 4)
    """
    size = len(seconds)
    if num_slots < size:
        return even_deal(num_slots, size)
    if any(not 0 < one < float("inf") for one in seconds):
        raise ValueError(f"seconds per slot are {list(seconds)}; expected finite numbers above 0")
    sizes = [1] * size
    queue = [(2 * one, 1, rank) for rank, one in enumerate(seconds)]  # of equals, who has fewer
    heapq.heapify(queue)
    for _ in range(num_slots - size):
        *_, rank = queue[0]
        sizes[rank] += 1
        heapq.heapreplace(queue, ((sizes[rank] + 1) * seconds[rank], sizes[rank], rank))
    return tuple(sizes)


def span(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return when the last worker is done with its slots.

    >>> span((8, 8, 8, 4), [1.0, 1.0, 1.0, 2.0])
    8.0
    """
    return max(size * one for size, one in zip(sizes, seconds, strict=True))


def better_deal(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...] | None:
    """Return another deal that is worth a change; None: leave it as it is. Even sizes win where they do as well.

    >>> better_deal((7, 7, 7, 7), [1.0, 1.0, 1.0, 2.0]), better_deal((7, 7, 7, 7), [1.0, 1.0, 1.0, 1.1])
    ((8, 8, 8, 4), None)
    """
    num_slots, now = sum(sizes), span(sizes, seconds)
    best = deal(num_slots, seconds)
    even = even_deal(num_slots, len(sizes))
    if span(even, seconds) <= span(best, seconds):
        best = even
    saved = now - span(best, seconds)
    return best if saved >= MIN_GAIN * now and saved >= MIN_SECONDS else None
