"""Computes with boxes in index space, for specs, resharding and partial loads. Pure; no tensors move here.

A ``Box`` is a half-open hyper-rectangle: where it begins in each dim and how long it is. A 0-dim box holds one element.
A box with a zero length holds nothing and overlaps nothing, wherever it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """``offsets`` and ``sizes`` per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_size(cls, sizes: Sequence[int]) -> Box:
        return cls((0,) * len(sizes), tuple(sizes))

    @property
    def volume(self) -> int:
        return prod(self.sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """Return what both hold; None when that is nothing."""
    begins, sizes = [], []
    for a_begin, a_size, b_begin, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        begin = max(a_begin, b_begin)
        size = min(a_begin + a_size, b_begin + b_size) - begin
        if size <= 0:
            return None
        begins.append(begin)
        sizes.append(size)
    return Box(tuple(begins), tuple(sizes))


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes that share an element, or None. Sweeps along the dim with the most distinct
    begins."""
    filled = [index for index, box in enumerate(boxes) if box.volume]
    if len(filled) < 2:
        return None
    num_dims = len(boxes[filled[0]].offsets)
    if num_dims == 0:
        return filled[0], filled[1]
    sweep = max(range(num_dims), key=lambda dim: len({boxes[index].offsets[dim] for index in filled}))
    active: list[int] = []
    for index in sorted(filled, key=lambda index: boxes[index].offsets[sweep]):
        begin = boxes[index].offsets[sweep]
        active = [a for a in active if boxes[a].offsets[sweep] + boxes[a].sizes[sweep] > begin]
        for other in active:
            if intersect(boxes[other], boxes[index]) is not None:
                return min(other, index), max(other, index)
        active.append(index)
    return None


def chunk_lengths(length: int, num_chunks: int) -> tuple[int, list[int]]:
    """Return the step between chunks and each chunk's length, as ``torch.chunk`` has it, with empty chunks at the
    end."""
    step = -(-length // num_chunks)
    return step, [max(0, min(length, step * (index + 1)) - step * index) for index in range(num_chunks)]


def view_of(tensor: Tensor, box: Box, origin: Sequence[int]) -> Tensor:
    """View the region of ``tensor`` that is ``box``, where ``tensor`` itself begins at ``origin``."""
    for dim, (begin, size, first) in enumerate(zip(box.offsets, box.sizes, origin, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin - first if size else 0, size)
    return tensor


def split_box(box: Box, max_volume: int) -> list[Box]:
    """Cut a box into pieces of at most ``max_volume`` elements, each one run of memory in row-major order if it can."""
    if box.volume <= max_volume or not box.sizes:
        return [box]
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    inner = prod(box.sizes[dim + 1 :])
    step = max(1, max_volume // inner)
    pieces = []
    for begin in range(0, box.sizes[dim], step):
        length = min(step, box.sizes[dim] - begin)
        piece = Box(
            (*box.offsets[:dim], box.offsets[dim] + begin, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], length, *box.sizes[dim + 1 :]),
        )
        pieces.extend(split_box(piece, max_volume))
    return pieces
