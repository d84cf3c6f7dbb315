"""Digests of a flat vector by cells, from whatever ranges a rank holds: pure functions of a layout and memory.

A cell is ``CELL`` elements of the flat vector, wherever its holders' ranges begin and end. Its digest is a sum: the
bits of each element (in words of at most 32) times an odd number of 64 bits that belongs to its place in the cell,
added up modulo 2**64; two such sums, with different numbers. So each rank adds up what it owns, one all-reduce of 16
bytes a cell gives the digests of all cells on every rank, and the result does not depend on who holds what, nor on how
many there are. Above the cells is a tree: cells, vector, and what the caller makes of several vectors.

It tells states apart that differ by accident, and where; it is no defence against somebody who wants two alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.fsdp.layout._unit_layout import Range, UnitLayout

CELL = 1 << 16
_SEEDS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)


def cell_sums(layout: UnitLayout, rank: int, local: Tensor) -> Tensor:
    """Return two words for every cell, of the elements that ``rank`` owns of the vector laid out by ``layout``.

    ``local``: its held ranges laid end to end. Summed over the ranks, each cell has its digest.
    """
    sums = np.zeros((-(-layout.length // CELL), len(_SEEDS)), dtype=np.uint64)
    bits = _bits(local)
    per_element = max(1, local.element_size() // 4)
    factors = _factors(CELL * per_element)
    for begin, end in _by_cell(layout.owned[rank]):
        at, count = layout.local_span(rank, begin, end)[0] * per_element, (end - begin) * per_element
        words = bits[at : at + count].astype(np.uint64)
        first = begin % CELL * per_element
        sums[begin // CELL] += np.array([np.dot(row[first : first + count], words) for row in factors])
    return torch.from_numpy(sums.view(np.int64))


def digest_of_cells(sums: Tensor, about: str = "") -> str:
    """Return the digest above those of the cells; ``about`` is what else must be equal (length, dtype)."""
    return blake2b(about.encode() + b"\0" + sums.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def _by_cell(ranges: tuple[Range, ...]) -> Iterator[Range]:
    for begin, end in ranges:
        while begin < end:
            stop = min(end, (begin // CELL + 1) * CELL)
            yield begin, stop
            begin = stop


def _bits(local: Tensor) -> Any:
    """Return the bits of the elements as unsigned integers of at most 32, several for a wide element."""
    flat = local.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(f"u{min(4, flat.element_size())}")


@cache
def _factors(count: int) -> Any:
    """Return ``count`` odd numbers for each of the sums: the same for ever."""
    rows = []
    for seed in _SEEDS:
        words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(seed)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words ^= words >> np.uint64(shift)
            words *= np.uint64(factor)
        rows.append((words ^ words >> np.uint64(31)) | np.uint64(1))
    return rows
