"""The numbers of a step that ride along: loss, weight, samples, use and notes of every slot, and workers' wishes.

Each worker has a row for each of its slots and one for itself; one all-gather gives all rows to all, and everybody adds
the slots' up along the slot tree, as ``reduce`` adds those of whole replicas. Slot 0's buffers come from rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.elastic.reduce._flat_layout import SCALARS
from phalanx.elastic.reduce._slots import fold
from phalanx.elastic.reduce._waves import WavePlan


@dataclass(frozen=True)
class SlotRow:
    """What one slot contributes."""

    scalars: Mapping[str, float]
    used: Sequence[int]
    """The numbers of the parameters that had a gradient."""
    note: int = 0


@dataclass(frozen=True)
class StepNumbers:
    """What all workers know of a reduced step."""

    sums: dict[str, float]
    used: tuple[float, ...]
    """For each trained parameter, in how many slots it had a gradient."""
    notes: Tensor
    wishes: tuple[dict[str, float], ...]
    """Of each worker."""


WISHES = ("wish", "leaving", "again", "seconds", "rate", "pace", "waves", "asked", "answered")
"""Of a worker: what it wants, how long its last step took, how fast cells moved, what a slot and all waves took it in
this step, how many requests for a save it has heard of, and how many it knows to be dealt with."""


def exchange_numbers(
    group: Group, rows: Mapping[int, SlotRow], wishes: Mapping[str, float], *, waves: WavePlan, num_params: int
) -> StepNumbers:
    """Give this worker's rows and wishes to all; what they are together."""
    size, num_slots = group.size, len(waves.owners)
    width = max(len(SCALARS) + num_params + 1, len(WISHES))
    places = waves.places
    num_rows = 1 + max(row for _, row in places)
    mine = torch.zeros(num_rows + 1, width)
    for slot, row in rows.items():
        line = mine[places[slot][1]]
        line[: len(SCALARS)] = torch.tensor([row.scalars.get(name, 0.0) for name in SCALARS])
        if row.used:
            line[[len(SCALARS) + index for index in row.used]] = 1.0
        line[-1] = float(row.note)
    mine[-1, : len(WISHES)] = torch.tensor([float(wishes.get(name, 0.0)) for name in WISHES])
    told = mine[None]
    if size > 1:
        told = torch.empty(size, num_rows + 1, width)
        group.all_gather_into_tensor(told.view(-1), mine.view(-1))
    by_slot = {(slot, slot + 1): told[places[slot]] for slot in range(num_slots)}
    notes = torch.stack([row[-1] for row in by_slot.values()])
    total = fold(num_slots, {node: row[:-1].clone() for node, row in by_slot.items()}, lambda a, b: a.add_(b)).tolist()
    each = tuple(dict(zip(WISHES, line, strict=True)) for line in told[:, -1, : len(WISHES)].tolist())
    sums = dict(zip(SCALARS, total[: len(SCALARS)], strict=True))
    sums.update({name: sum(one[name] for one in each) for name in WISHES})
    return StepNumbers(sums, tuple(total[len(SCALARS) :][:num_params]), notes, each)


def exchange_buffers(group: Group, first: Sequence[Tensor] | None, like: Sequence[Tensor]) -> list[Tensor]:
    """Return slot 0's buffers, which rank 0 has computed, on all workers."""
    if not like:
        return []
    if group.size == 1:
        assert first is not None, "rank 0 has computed slot 0"
        return list(first)
    sizes = [buffer.numel() * buffer.element_size() for buffer in like]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8)
    if group.rank == 0:
        assert first is not None, "rank 0 has computed slot 0"
        packed = torch.cat([b.detach().contiguous().reshape(-1).view(torch.uint8) for b in first])
    group.broadcast(packed, 0)
    # A copy starts at an aligned address; a view of wider elements may not start in the middle of a word.
    return [
        part.clone().view(buffer.dtype).view(buffer.shape)
        for part, buffer in zip(packed.split(sizes), like, strict=True)
    ]
