"""Decides who computes a slot a second time, and who of the workers is wrong. Pure values only.

Owns the choice (``VerifySlots``), ``plan_check``, which all workers make alike from seed, step and deal, and ``judge``,
which all make alike from what each of them found. What they find is measured in ``_verifying``.

Rules of ``judge``: weights and sums that should be equal everywhere, or on all holders of a cell: who has other ones
than most is wrong. A message:
who received something other than what was sent. A slot: the second worker's bits against the first's tell that one is
wrong, a third worker's tell which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from phalanx.elastic._rng import derive_seed
from phalanx.errors import JobStopped


@dataclass(frozen=True, kw_only=True)
class VerifySlots:
    """Every so many steps one slot is computed by a second worker as well, and the bits are compared before commit.

    With them the messages of that step's reduction, its sum, and the weights that it began with.

    >>> VerifySlots(every=100).every
    100
    """

    every: int = 100

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; expected at least 1 step")


class NobodyDecides(JobStopped):
    """Workers differ in bits that should be equal, and it cannot be said who is wrong."""


@dataclass(frozen=True, kw_only=True)
class SlotCheck:
    """Which slot of a step is computed again: its worker, the second, and who is asked if they differ (-1: nobody)."""

    slot: int
    first: int
    second: int
    third: int = -1


def plan_check(options: VerifySlots | None, seed: int, step: int, ranges: Sequence[Sequence[int]]) -> SlotCheck | None:
    """Return what is checked in a step; None: nothing, or nobody is there to do it. ``ranges`` are the workers' slots.

    >>> plan_check(VerifySlots(every=10), 0, 8, [range(0, 2), range(2, 4)]) is None
    True
    >>> check = plan_check(VerifySlots(every=10), 0, 9, [range(0, 2), range(2, 4), range(4, 6)])
    >>> len({check.first, check.second, check.third})
    3
    """
    size = len(ranges)
    if options is None or size < 2 or (step + 1) % options.every:
        return None
    slot = derive_seed(seed, "verify", step) % sum(map(len, ranges))
    first = next(rank for rank, slots in enumerate(ranges) if slot in slots)
    start = derive_seed(seed, "second", step) % (size - 1)
    others = [(first + 1 + (start + i) % (size - 1)) % size for i in range(size - 1)]
    return SlotCheck(slot=slot, first=first, second=others[0], third=others[1] if size > 2 else -1)


@dataclass(frozen=True, kw_only=True)
class StepDigests:
    """What one worker found in a step that is checked, as digests.

    ``sent`` and ``received`` have a list for each worker: of each bucket, the digests of the blocks of the message.
    ``cells`` has those of the weights of each cell that a worker of a sharded job holds, by its number.
    """

    weights: str = ""
    total: str = ""
    slot: str = ""
    sent: Sequence[Sequence[str]] = field(default_factory=tuple)
    received: Sequence[Sequence[str]] = field(default_factory=tuple)
    cells: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StepDigests:
        return cls(**record)


class WrongKind(Enum):
    WEIGHTS = "weights"
    MESSAGE = "message"
    SUM = "sum"
    SLOT = "slot"


@dataclass(frozen=True, kw_only=True)
class WrongWorker:
    """Who differs from whom, and in what. ``is_known``: it is the first of the two that is wrong."""

    kind: WrongKind
    odd: int
    right: int
    is_known: bool = True
    block: int = -1
    """Of a message: the first block that differs."""
    cell: int = -1
    """Of the weights of a sharded job: the first cell that differs."""


def judge(check: SlotCheck, found: Sequence[StepDigests], *, is_trial: bool = False) -> WrongWorker | None:
    """Return what is wrong with a step; None: nothing. In a trial ``found[check.third].slot`` is what decides.

    >>> good, bad = StepDigests(weights="a", total="t"), StepDigests(weights="b", total="t")
    >>> judge(SlotCheck(slot=0, first=0, second=1), [good, bad, good])
    WrongWorker(kind=<WrongKind.WEIGHTS: 'weights'>, odd=1, right=0, is_known=True, block=-1, cell=-1)
    """
    odd = _minority([one.weights for one in found])
    if odd is not None:
        return WrongWorker(kind=WrongKind.WEIGHTS, odd=odd[0], right=odd[1], is_known=odd[2])
    of_cell = _judge_cells(found)
    if of_cell is not None:
        return of_cell
    for rank, one in enumerate(found):
        for peer, blocks in enumerate(one.received):
            sent = found[peer].sent[rank]
            if list(sent) != list(blocks):
                block = next((i for i, (a, b) in enumerate(zip(sent, blocks, strict=False)) if a != b), 0)
                return WrongWorker(kind=WrongKind.MESSAGE, odd=rank, right=peer, block=block)
    slot = _judge_slot(check, found, is_trial=is_trial)
    if slot is not None:
        return slot
    odd = _minority([one.total for one in found])
    return None if odd is None else WrongWorker(kind=WrongKind.SUM, odd=odd[0], right=odd[1], is_known=odd[2])


def _judge_cells(found: Sequence[StepDigests]) -> WrongWorker | None:
    """Return who holds a cell with other weights than most of its holders."""
    held: dict[str, dict[int, str]] = {}
    for rank, one in enumerate(found):
        for cell, value in one.cells.items():
            held.setdefault(cell, {})[rank] = value
    for cell, values in held.items():
        ranks, odd = list(values), _minority(list(values.values()))
        if odd is not None:
            odd_one, right = ranks[odd[0]], ranks[odd[1]]
            return WrongWorker(kind=WrongKind.WEIGHTS, odd=odd_one, right=right, is_known=odd[2], cell=int(cell))
    return None


def _judge_slot(check: SlotCheck, found: Sequence[StepDigests], *, is_trial: bool) -> WrongWorker | None:
    first, second = found[check.first].slot, found[check.second].slot
    if first == second:
        return None
    if is_trial and found[check.third].slot == first:
        return WrongWorker(kind=WrongKind.SLOT, odd=check.second, right=check.first)
    if is_trial and found[check.third].slot == second:
        return WrongWorker(kind=WrongKind.SLOT, odd=check.first, right=check.second)
    return WrongWorker(kind=WrongKind.SLOT, odd=check.first, right=check.second, is_known=False)


def _minority(values: Sequence[str]) -> tuple[int, int, bool] | None:
    """Return a rank that has another value than most, one of those, and whether these are more than half."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return None
    common, number = counts[0]
    right = values.index(common)
    odd = next(rank for rank, value in enumerate(values) if value != common)
    return odd, right, 2 * number > len(values)
