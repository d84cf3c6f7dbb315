"""Which boxes of a DTensor this rank holds: what ``torch.distributed.checkpoint`` saves, and loads into.

Owns ``held_boxes``. A rank holds one box, or several where a strided shard gives it several ranges of a dim.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from phalanx.comm.torch_interop._dcp import HeldBox
from phalanx.tensor.layout._placement import ranges_of
from phalanx.tensor.layout._spec import Spec


def held_boxes(spec: Spec, local: Tensor) -> list[HeldBox]:
    """List the boxes of the global tensor that ``local`` consists of; one that says so where there are no elements.

    >>> held_boxes(spec, local)   # doctest: +SKIP
    [HeldBox(offsets=(4, 0), sizes=(4, 3), tensor=...)]
    """
    if spec.is_outside:
        return []
    if spec.num_elements == 0:
        return [HeldBox((0,) * len(spec.shape), tuple(spec.shape), local.new_empty(spec.shape))]
    by_dim = []
    for dim, length in enumerate(spec.shape):
        ranges, position = [], 0
        for start, size in ranges_of(length, spec.shards(dim)):
            ranges.append((start, size, position))
            position += size
        by_dim.append(ranges)
    boxes = []
    for pieces in itertools.product(*by_dim):
        where = tuple(slice(position, position + size) for _, size, position in pieces)
        offsets, sizes = tuple(start for start, _, _ in pieces), tuple(size for _, size, _ in pieces)
        boxes.append(HeldBox(offsets, sizes, local[where] if where else local))
    return boxes


def slices(box: HeldBox) -> tuple[slice, ...]:
    """Index the global tensor by ``box``."""
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
