"""Which unit is it? Every gather and every reduction carries the unit's number, and all ranks compare.

Collectives are matched by order alone: ranks that run units in different orders would mix up their bytes, silently
where two units have one size. A gather sends the number in its header. A reduction adds the number's bits up: each sum
must be 0 or the number of ranks, whatever dtype it is summed in.

Where sizes differ there is no header to read: gloo ends the process that gets more than it has room for, and ranks of
which some gather and others reduce wait for each other. So where the transport does not compare calls itself, ranks
``agree`` what comes next before anything of it is sent.

Numbers are given out in the order of ``fully_shard`` calls on a group, which is the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.errors import CollectiveMismatch

TAG_BITS = 16


class Numbers:
    """The units of one group by number."""

    def __init__(self) -> None:
        self._next = 1
        self._units: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def add(self, unit: Any) -> int:
        number = self._next
        self._next = number % ((1 << TAG_BITS) - 1) + 1
        self._units[number] = unit
        return number

    def name(self, number: int) -> str:
        unit = self._units.get(number)
        return f"unit number {number}, which this rank does not have" if unit is None else str(unit)


_numbers: WeakKeyDictionary[Group, Numbers] = weakref.WeakKeyDictionary()


def numbers_of(group: Group) -> Numbers:
    found = _numbers.get(group)
    if found is None:
        found = _numbers[group] = Numbers()
    return found


DEEDS = ("gathers", "reduces", "adds the replicas' sums of")
"""What a rank may be about to do with a unit."""


def agree(group: Group, deed: str, number: int, nbytes: int, names: Group | None = None) -> None:
    """Raise on every rank, before anything is sent, unless all are about to do the same with the same unit.

    ``names``: the group whose numbers they are, if not this one's.
    """
    kind = DEEDS.index(deed)
    rows = group.tell((kind, number, nbytes))
    if rows is None or rows.count(rows[0]) == len(rows):
        return
    own = rows[group.rank]
    rank = next(rank for rank, row in enumerate(rows) if row != own)
    if rows[rank][:2] == own[:2]:
        raise CollectiveMismatch(
            f"rank {group.rank} {deed} {_names(group, names).name(number)} with {nbytes} bytes where rank {rank} has "
            f"{rows[rank][2]}; every rank must use the same dtypes, and train the same parameters of a unit"
        )
    _refuse(group, deed, number, rank, rows[rank][1], DEEDS[rows[rank][0]], names)


def _names(group: Group, names: Group | None) -> Numbers:
    return numbers_of(group if names is None else names)


def write_number(header: Tensor, number: int) -> None:
    """Put the number into the header of what is gathered."""
    header.view(torch.int64)[0] = number


def check_gathered(group: Group, number: int, found: Sequence[int]) -> None:
    """Raise unless every rank gathered the same unit."""
    for rank, other in enumerate(found):
        check_sent(group, "gathers", number, rank, other)


def check_sent(group: Group, what: str, number: int, rank: int, other: int) -> None:
    """Raise unless ``rank`` does what this rank does with the same unit."""
    if other != number:
        _refuse(group, what, number, rank, other)


def write_bits(header: Tensor, number: int) -> None:
    """Put the number's bits into the header of what is reduced."""
    header[:TAG_BITS] = torch.tensor([number >> bit & 1 for bit in range(TAG_BITS)], dtype=header.dtype)


def check_reduced(group: Group, number: int, sums: Sequence[float], num_ranks: int, names: Group | None = None) -> None:
    """Raise unless every rank reduced the same unit. Then all ranks find out, and tell each other which it was."""
    expected = [num_ranks * (number >> bit & 1) for bit in range(TAG_BITS)]
    if list(sums[:TAG_BITS]) == expected:
        return
    numbers = group.all_gather_values(number)
    for rank, other in enumerate(numbers):
        if other != number:
            _refuse(group, "reduces", number, rank, other, names=names)
    raise CollectiveMismatch(
        f"rank {group.rank}: the reduction of {_names(group, names).name(number)} came back with the marks of another "
        f"unit, although all ranks of this group reduced the same one: another group ran units in another order"
    )


def _refuse(
    group: Group, what: str, number: int, rank: int, other: int, theirs: str = "", names: Group | None = None
) -> None:
    known = _names(group, names)
    raise CollectiveMismatch(
        f"rank {group.rank} {what} {known.name(number)} where rank {rank} {theirs or what} {known.name(other)}; every "
        f"rank must run the same modules in the same order. Call a module on all ranks or on none, on dummy data if "
        f"need be"
    )
