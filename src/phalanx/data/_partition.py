"""Decides who takes which positions: pure arithmetic over the positions of an epoch.

Owns the split of positions over replicas (``Share``) and of steps over slots (``Timeline``), and what
happens at the end of an epoch (``Tail``). Knows neither orders nor datasets, and holds no state.

Invariant of both: what is done is a prefix of the epoch's positions, at any world size. That is why
one number describes it and why it can be split anew over any other number of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from phalanx.data._permutation import Indices

#: What happens when the rest of an epoch does not divide evenly.
#: pad: repeat samples from the epoch's beginning; drop: leave the rest out; uneven: some get less;
#: mask: as pad, but what is repeated is marked with weight 0.
Tail = Literal["pad", "drop", "uneven", "mask"]


def checked_tail(tail: str | None, drop_last: bool = False) -> Tail:
    if tail is None:
        return "drop" if drop_last else "pad"
    for known in get_args(Tail):
        if tail == known:
            if drop_last and tail != "drop":
                raise ValueError(f"drop_last=True contradicts tail={tail!r}; leave one of them out")
            return known  # type: ignore[no-any-return]  # get_args is untyped; these are Tail's values
    raise ValueError(f"tail is {tail!r}; expected one of {', '.join(map(repr, get_args(Tail)))}")


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of several replicas takes of the positions [start, length).

    In round i, replica r takes position start + i * num_replicas + r. Positions from ``length`` on are
    padding.

    >>> Share(length=10, start=4, num_replicas=4, rank=1, tail="pad").positions(0, 2).tolist()
    [5, 9]
    """

    length: int
    start: int
    num_replicas: int
    rank: int
    tail: Tail

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas is {self.num_replicas}; expected at least 1")
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank}; expected one in [0, {self.num_replicas})")
        if self.tail == "drop" and self.num_replicas > self.length:
            raise ValueError(
                f"tail='drop' with {self.num_replicas} replicas drops all {self.length} samples of every "
                "epoch; use tail='pad', 'uneven' or 'mask', or fewer replicas"
            )

    @property
    def rounds(self) -> int:
        """How many rounds there are in which any replica takes a sample."""
        rest = self.length - self.start
        return rest // self.num_replicas if self.tail == "drop" else -(-rest // self.num_replicas)

    @property
    def count(self) -> int:
        """How many samples this replica takes."""
        if self.tail != "uneven":
            return self.rounds
        return max(0, -(-(self.length - self.start - self.rank) // self.num_replicas))

    def positions(self, first: int, stop: int) -> Indices:
        """Return this replica's positions of the rounds [first, stop)."""
        return np.arange(first, stop, dtype=np.int64) * self.num_replicas + (self.start + self.rank)

    def position_after(self, rounds: int) -> int:
        """Return how many positions are done once all replicas have done ``rounds`` rounds.

        The last round also settles what "drop" leaves out: then the epoch is over.
        """
        if rounds and rounds >= self.rounds:
            return self.length
        return self.start + rounds * self.num_replicas


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Which positions of which epoch each step takes: ``step_size`` in a row, epoch after epoch.

    Step ``first_step`` stands at ``first_position`` of ``first_epoch``; a run from its beginning has
    three zeros there. Only a run resumed with another step size has others.

    >>> Timeline(length=10, step_size=4, tail="pad").locate(4)
    (1, 4)
    """

    length: int
    step_size: int
    tail: Tail
    first_step: int = 0
    first_epoch: int = 0
    first_position: int = 0

    def __post_init__(self) -> None:
        if self.tail == "drop" and self.step_size > self.length:
            raise ValueError(
                f"tail='drop' with steps of {self.step_size} samples drops all {self.length} samples of "
                "every epoch; use tail='pad', 'uneven' or 'mask', or smaller steps"
            )

    def steps_from(self, position: int) -> int:
        """Return how many steps an epoch has from ``position`` on."""
        rest = self.length - position
        return rest // self.step_size if self.tail == "drop" else -(-rest // self.step_size)

    def locate(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step and the position at which the step begins."""
        since = step - self.first_step
        if since < 0:
            raise ValueError(
                f"step {step} is before step {self.first_step}, where this run was resumed with another step "
                "size; its samples are not known any more"
            )
        in_first = self.steps_from(self.first_position)
        if since < in_first:
            return self.first_epoch, self.first_position + since * self.step_size
        epochs, since = divmod(since - in_first, self.steps_from(0))
        return self.first_epoch + 1 + epochs, since * self.step_size

    def end_of_epoch(self, step: int) -> int:
        """Return the first step of the epoch after that of ``step``."""
        return step + self.steps_from(self.locate(step)[1])

    def slot_range(self, position: int, slot: int, num_slots: int) -> tuple[int, int]:
        """Return the positions [first, stop) of a slot in the step that begins at ``position``.

        Slots take equal contiguous parts; those of a short last step differ by one at most.
        """
        size = self.step_size
        if self.tail == "uneven":
            size = min(size, self.length - position)
        return position + slot * size // num_slots, position + (slot + 1) * size // num_slots


def slots_of(rank: int, num_workers: int, num_slots: int) -> range:
    """Return the contiguous slots that a worker carries; numbers differ by one at most.

    >>> [list(slots_of(rank, 2, 5)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    if not 0 <= rank < num_workers:
        raise ValueError(f"rank is {rank}; expected one in [0, {num_workers})")
    return range(rank * num_slots // num_workers, (rank + 1) * num_slots // num_workers)
