"""What the owners find in a reduced gradient, exchanged at the commit point: is it finite, and its norm's blocks.

Owns the layout of that exchange: each worker sends two marks and the sums of squares of the blocks that it owns, in the
model's order; everybody adds all blocks up along one fixed tree, so the norm has one value for any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.elastic.reduce._norm_blocks import block_sums, norm_of, num_blocks
from phalanx.elastic.sharded._cell_store import CellStore
from phalanx.elastic.sharded._model_units import ModelParameter
from phalanx.fsdp.layout._unit_layout import Range, intersect

MARKS = 2


@dataclass(frozen=True)
class StepVerdict:
    """What all workers know when they have passed the commit point; equal on all."""

    is_finite: bool
    found_inf: bool
    """Whether the gradient scaler found a value that is not finite."""
    norm: float | None
    """Of the whole gradient, if it is to be clipped or looked at."""
    is_skipped: bool = False
    """Whether the guard left the update out."""
    back_to: int | None = None
    """The step of the save whose weights the guard has brought back."""

    @classmethod
    def from_json(cls, value: Any) -> StepVerdict:
        is_finite, found_inf, norm, is_skipped, back_to = value
        return cls(
            bool(is_finite),
            bool(found_inf),
            None if norm is None else float(norm),
            bool(is_skipped),
            None if back_to is None else int(back_to),
        )

    def to_json(self) -> list[bool | float | None]:
        return [self.is_finite, self.found_inf, self.norm, self.is_skipped, self.back_to]


def exchange_verdict(
    group: Group,
    store: CellStore,
    trained: Sequence[ModelParameter],
    used: Sequence[float],
    *,
    is_finite: bool,
    found_inf: bool,
    with_norm: bool,
) -> StepVerdict:
    """Pass the commit point: returns on no worker before all have come here, prepared. ``is_finite`` and ``found_inf``
    are what this worker has found in what it holds."""
    places = store.plan("owned", lambda: [_owned(store, parameter, group.size) for parameter in trained])
    counts = store.plan("blocks", lambda: [sum(_num_blocks(each[r]) for each in places) for r in range(group.size)])
    width = MARKS + (max(counts) if with_norm else 0)
    mine = torch.zeros(width, dtype=torch.float64)
    mine[0] = float(not is_finite)
    mine[1] = float(found_inf)
    if with_norm:
        pieces = [
            _grad(store, parameter, begin, end, group.rank) if count else torch.zeros(()).expand(end - begin)
            for parameter, ranges, count in zip(trained, places, used, strict=True)
            for begin, end in ranges[group.rank]
        ]
        mine[MARKS : MARKS + counts[group.rank]] = block_sums(pieces)
    told = mine
    if group.size > 1:
        told = torch.empty(group.size * width, dtype=torch.float64)
        group.all_gather_into_tensor(told, mine)
    rows = told.view(group.size, width)
    order = store.plan("order", lambda: _order(places)) if with_norm else []
    norm = norm_of(torch.cat([rows[r, a:b] for r, a, b in order])) if order else 0.0 if with_norm else None
    marks = rows[:, :MARKS].sum(0).tolist()
    return StepVerdict(not marks[0], bool(marks[1]), norm)


def _owned(store: CellStore, parameter: ModelParameter, size: int) -> list[tuple[Range, ...]]:
    """Return what each rank owns of a parameter."""
    layout = store.sections[parameter.key[:2]].layout
    return [intersect(layout.owned[rank], [parameter.extent]) for rank in range(size)]


def _num_blocks(ranges: Sequence[Range]) -> int:
    return sum(num_blocks(end - begin) for begin, end in ranges)


def _grad(store: CellStore, parameter: ModelParameter, begin: int, end: int, rank: int) -> Tensor:
    held = store.sections[parameter.key[:2]]
    start, stop = held.layout.local_span(rank, begin, end)
    return held.grad[start:stop]


def _order(places: Sequence[Sequence[Sequence[Range]]]) -> list[tuple[int, int, int]]:
    """Return where the blocks of all parameters are in the model's order: (rank, from, to) in what each rank sent."""
    at = [MARKS] * (len(places[0]) if places else 0)
    found = []
    for by_rank in places:
        for _, rank, count in sorted(
            (begin, rank, _num_blocks([(begin, end)])) for rank, each in enumerate(by_rank) for begin, end in each
        ):
            found.append((rank, at[rank], at[rank] + count))
            at[rank] += count
    return found
