"""Plans in which waves a sharded job computes its slots, so that a slow worker holds up few of them.

Pure values only. All workers take part in a wave's gathers and reductions, so it takes as long as the slowest of those
who compute in it: a slow worker costs each wave in which it has a slot, and skipping waves is all that helps. Then
others compute its slots, in more waves. Each wave costs its gathers and reductions, too, so more of them pay only where
slots take longer than these: what waves cost is measured, and part of every comparison.

Invariants: slots are in order, each in one wave; the first wave has everybody, in the order of ranks, so that slot 0 is
rank 0's and everybody goes on being measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.elastic.reduce._deal import MIN_GAIN, MIN_SECONDS

FOLLOWED = 1.6
"""What a wave that some only follow costs, over one in which all compute, as long as it is not measured: those who
compute announce there what they do. Of the benchmark ``stragglers`` on two cores."""


@dataclass(frozen=True)
class WavePlan:
    """Who computes in each wave: ranks in the order of the slots.

    >>> plan = WavePlan(((0, 1, 2), (0, 2), (0,)))
    >>> plan.slots_of(0), plan.slots_of(1), plan.owners[4], plan.sizes(3), plan.is_even
    ((0, 3, 5), (1,), 2, (3, 1, 2), False)
    """

    waves: tuple[tuple[int, ...], ...]

    @property
    def is_even(self) -> bool:
        """Return whether nobody skips a wave, but for the last."""
        return all(len(wave) == len(self.waves[0]) for wave in self.waves[:-1])

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank of each slot."""
        return tuple(rank for wave in self.waves for rank in wave)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each slot its rank, and the how manieth of that rank's slots it is."""
        counts: Counter[int] = Counter()
        found = []
        for rank in self.owners:
            found.append((rank, counts[rank]))
            counts[rank] += 1
        return tuple(found)

    def slots_of(self, rank: int) -> tuple[int, ...]:
        """Return the slots of a worker."""
        return tuple(slot for slot, owner in enumerate(self.owners) if owner == rank)

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return how many slots each worker has."""
        counts = Counter(self.owners)
        return tuple(counts[rank] for rank in range(size))


def even_waves(num_slots: int, size: int) -> WavePlan:
    """Return the plan with which a round begins: in wave j worker r computes slot ``j * size + r``.

    >>> even_waves(5, 2).waves
    ((0, 1), (0, 1), (0,))
    """
    return WavePlan(_chunks(range(size), num_slots))


def relieved_waves(num_slots: int, size: int, relieved: Collection[int]) -> WavePlan:
    """Return the plan in which some workers compute in the first wave only.

    >>> relieved_waves(9, 3, {1}).waves
    ((0, 1, 2), (0, 2), (0, 2), (0, 2))
    """
    others = [rank for rank in range(size) if rank not in relieved]
    return WavePlan((tuple(range(size)), *_chunks(others, num_slots - size)))


def _chunks(ranks: Sequence[int], num_slots: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks[: num_slots - first]) for first in range(0, num_slots, len(ranks)))


def span(plan: WavePlan, seconds: Sequence[float]) -> float:
    """Return what the slots of all waves take; ``seconds`` is what a slot takes on each worker.

    >>> span(even_waves(6, 2), [1.0, 2.0]), span(relieved_waves(6, 2, {1}), [1.0, 2.0])
    (6.0, 6.0)
    """
    return sum(max(seconds[rank] for rank in wave) for wave in plan.waves)


def wave_cost(plan: WavePlan, seconds: Sequence[float], whole: float) -> float:
    """Return what a wave costs beyond its slots, of what all waves of a step took.

    >>> wave_cost(even_waves(6, 2), [1.0, 2.0], 6.75)
    0.25
    """
    return max(0.0, whole - span(plan, seconds)) / len(plan.waves)


def expected(plan: WavePlan, seconds: Sequence[float], costs: Mapping[bool, float]) -> float:
    """Return what the waves of a plan take together; ``costs`` are those of a wave, by ``is_even``, that are known.

    >>> expected(even_waves(6, 2), [1.0, 2.0], {True: 0.25}), expected(even_waves(6, 2), [1.0, 2.0], {})
    (6.75, 6.0)
    >>> expected(relieved_waves(6, 2, {1}), [1.0, 2.0], {True: 0.25, False: 0.5})
    8.5
    """
    other = costs.get(not plan.is_even, 0.0) * (1 / FOLLOWED if plan.is_even else FOLLOWED)
    return span(plan, seconds) + len(plan.waves) * costs.get(plan.is_even, other)


def better_waves(plan: WavePlan, seconds: Sequence[float], costs: Mapping[bool, float]) -> WavePlan | None:
    """Return another plan that is worth a change; None: leave it as it is. Even waves win where they do as well.

    >>> better_waves(even_waves(28, 4), [1.0, 1.0, 1.0, 2.0], {}).sizes(4)
    (9, 9, 9, 1)
    >>> better_waves(even_waves(28, 4), [1.0, 1.0, 1.0, 1.2], {}) is None
    True
    >>> better_waves(even_waves(28, 4), [1.0, 1.0, 1.0, 2.0], {True: 1.0}) is None  # gathers as long as a slot
    True
    """
    num_slots, size = len(plan.owners), len(seconds)
    if num_slots <= size:
        return None
    slowest = sorted(range(size), key=lambda rank: -seconds[rank])
    even = even_waves(num_slots, size)
    plans = [even, *(relieved_waves(num_slots, size, slowest[:count]) for count in range(1, size))]
    best = min(plans, key=lambda one: expected(one, seconds, costs))
    now = expected(plan, seconds, costs)
    saved = now - expected(best, seconds, costs)
    if saved >= MIN_GAIN * now and saved >= MIN_SECONDS:
        return best
    return even if not plan.is_even and expected(even, seconds, costs) <= now else None
