"""Which positions of a sequence each rank holds, and which part of another rank's keys its queries may see.

Owns ``SequenceLayout`` and ``work_of``: pure values, known to every rank alike. With ``balanced`` the sequence is cut
into two chunks per rank, and rank r holds chunk r from the front and chunk r from the back (head and tail), so that
under a causal mask every rank has the same work at every step. Otherwise rank r holds one run of positions.

Invariants: chunks differ by one position at most, the longer ones first; a rank's positions ascend; of two ranks the
positions are disjoint, so one rank's chunk is seen by another's either wholly or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """A sequence of ``length`` positions on ``num_ranks`` ranks.

    >>> layout = SequenceLayout(length=8, num_ranks=2)
    >>> [layout.positions(rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    length: int
    num_ranks: int
    balanced: bool = True

    def __post_init__(self) -> None:
        if self.length < self.num_ranks:
            raise ValueError(
                f"a sequence of {self.length} positions on {self.num_ranks} ranks leaves ranks without any; "
                f"use a mesh of at most {self.length} ranks, or pad the sequence"
            )

    def segments(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of positions (half-open, ascending) that a rank holds."""
        num_chunks = self.num_ranks * (2 if self.balanced else 1)
        small, longer = divmod(self.length, num_chunks)
        bounds = [0, *accumulate(small + (chunk < longer) for chunk in range(num_chunks))]
        chunks = list(pairwise(bounds))
        return (chunks[rank], chunks[num_chunks - 1 - rank]) if self.balanced else (chunks[rank],)

    def size(self, rank: int) -> int:
        """Count the positions of a rank."""
        return sum(stop - start for start, stop in self.segments(rank))

    def positions(self, rank: int) -> Tensor:
        """Return a rank's positions, in the order in which it holds them."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.segments(rank)])

    def restoring_order(self) -> Tensor:
        """Return where each position stands when the ranks' parts are put one after the other."""
        return torch.argsort(torch.cat([self.positions(rank) for rank in range(self.num_ranks)]))


class BlockWork(NamedTuple):
    """The queries (``rows`` of this rank) and keys (``columns`` of the source) that meet, and whether causally."""

    rows: slice
    columns: slice
    causal: bool


def work_of(layout: SequenceLayout, rank: int, source: int, *, causal: bool) -> BlockWork | None:
    """Return what ``rank`` computes with the keys of ``source``; None: nothing.

    On its own keys a causal mask on the local tensors is the causal mask on positions, since those ascend. Of another
    rank's keys, later chunks of queries see earlier chunks of keys: always a rectangle, so no mask is needed.

    >>> layout = SequenceLayout(length=8, num_ranks=2)
    >>> work_of(layout, 0, 1, causal=True)
    BlockWork(rows=slice(2, 4, None), columns=slice(0, 4, None), causal=False)
    """
    if not causal or rank == source:
        return BlockWork(slice(0, layout.size(rank)), slice(0, layout.size(source)), causal)
    keys = layout.segments(source)
    first_row = next_row = last_column = 0
    sees = False
    for start, stop in layout.segments(rank):
        column = sum(k_stop - k_start for k_start, k_stop in keys if k_stop <= start)
        if column and stop > start:
            first_row, sees = (first_row, True) if sees else (next_row, True)
            last_column = max(last_column, column)
        next_row += stop - start
    return BlockWork(slice(first_row, next_row), slice(0, last_column), False) if sees else None
