"""Copies what a save writes into memory that the save before it has used: the part of a save that a step waits for.

New memory costs more than the copy: the kernel hands over and clears every page of it at its first touch. So the memory
of one save stays here for the next one.

Guarantee: memory is used again only when no tensor refers to it any more, whoever holds one; until then (a save that
is still being written, or waits for its disk) the next one gets memory of its own. At most one is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGN = 64
LARGEST_WASTE = 2
"""Memory that is more than so many times what is asked for is given back to the system."""

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Staging:
    """Where the copies of saves lie, one save after the other.

    >>> staging = Staging()
    >>> (first,) = staging.copy([torch.arange(3)])
    >>> place = first.data_ptr()
    >>> del first
    >>> (second,) = staging.copy([torch.arange(2)])
    >>> second, second.data_ptr() == place
    (tensor([0, 1]), True)
    """

    def __init__(self) -> None:
        self._kept: Memory | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies in main memory, contiguous; tensors on the meta device, which have no values, as they are."""
        sizes = [0 if one.is_meta else one.numel() * one.element_size() for one in tensors]
        ends = np.cumsum([-(-size // ALIGN) * ALIGN for size in sizes]).tolist()
        flat = self._lend(ends[-1] if ends else 0)
        copies = []
        for one, size, end in zip(tensors, sizes, ends, strict=True):
            if size:
                begin = end - -(-size // ALIGN) * ALIGN
                copy = flat[begin : begin + size].view(one.dtype).view(one.shape)
                copies.append(copy.copy_(one.detach()))
            else:
                copies.append(one if one.is_meta else one.detach().to("cpu", copy=True))
        return copies

    def _lend(self, nbytes: int) -> Tensor:
        """Return memory that comes back here when the last tensor that uses it is gone."""
        kept, self._kept = self._kept, None
        if kept is None or not nbytes <= kept.size <= max(nbytes, 1) * LARGEST_WASTE:
            kept = np.empty(nbytes, np.uint8)
        lent = kept[:nbytes]  # an object of its own: tensors hold it, and it goes with them
        weakref.finalize(lent, self._take_back, kept).atexit = False
        return torch.from_numpy(lent)

    def _take_back(self, memory: Memory) -> None:
        """Keep memory that is free again. Called by whichever thread was the last to use it."""
        self._kept = memory
