"""Which boxes of a DTensor this rank holds: what ``torch.distributed.checkpoint`` saves, and loads into.

Owns ``HeldParts``, the side of a DTensor that ``phalanx.comm.torch_interop._dcp`` speaks with. A rank holds one box, or
several where a strided shard gives it several ranges of a dim. Partial tensors have no shards that could be saved: what
they stand for is only known after a reduction, which is the user's to ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from phalanx.comm.torch_interop._dcp import HeldBox, Spread
from phalanx.tensor.core._copied_views import check_writable, fresh
from phalanx.tensor.layout._placement import ranges_of
from phalanx.tensor.layout._spec import Spec

if TYPE_CHECKING:
    from phalanx.tensor.core._dtensor import DTensor


def held_boxes(spec: Spec, local: Tensor) -> list[HeldBox]:
    """``local`` as the boxes of the global tensor that it consists of.

    >>> held_boxes(spec, local)   # doctest: +SKIP
    [HeldBox(offsets=(4, 0), sizes=(4, 3), tensor=...)]
    """
    by_dim = []
    for dim, length in enumerate(spec.shape):
        ranges, position = [], 0
        for start, size in ranges_of(length, spec.cuts(dim)):
            ranges.append((start, size, position))
            position += size
        by_dim.append(ranges)
    boxes = []
    for pieces in itertools.product(*by_dim):
        where = tuple(slice(position, position + size) for _, size, position in pieces)
        offsets, sizes = tuple(start for start, _, _ in pieces), tuple(size for _, size, _ in pieces)
        boxes.append(HeldBox(offsets, sizes, local[where] if where else local))
    return boxes


class HeldParts(Spread):
    """Part of ``DTensor``."""

    __slots__ = ()

    def _held_boxes(self, purpose: str) -> list[HeldBox]:
        tensor = cast("DTensor", self)
        spec = tensor._spec
        if spec.is_partial:
            raise ValueError(
                f"cannot {purpose} {spec!r} with torch.distributed.checkpoint: where it is partial, the values are "
                f"known only after a reduction. redistribute() it to Replicate() or Shard() first"
            )
        if purpose == "load":
            check_writable(tensor, "loading a checkpoint", anywhere=False)
        if spec.mesh.get_coordinate() is None:
            return []
        local = fresh(tensor).detach()
        if spec.num_elements == 0:
            return [HeldBox((0,) * len(spec.shape), tuple(spec.shape), local.new_empty(spec.shape))]
        return held_boxes(spec, local)

    def _whole(self) -> Tensor:
        with torch.no_grad():
            return cast("DTensor", self).full_tensor()

    def _cut_from(self, whole: Tensor) -> Tensor:
        from phalanx.tensor.core._dtensor import wrap

        tensor = cast("DTensor", self)
        if tensor.is_meta:
            tensor = wrap(
                torch.empty(tensor._spec.local_shape, dtype=tensor.dtype, device=whole.device), tensor._spec
            )
        for box in tensor._held_boxes("load"):
            box.tensor.copy_(whole[_slices(box)])
        return tensor

    def _distributed_from(self, whole: Tensor) -> Tensor:
        from phalanx.tensor.dispatch._distribute import distribute_tensor

        tensor = cast("DTensor", self)
        return distribute_tensor(whole.detach(), tensor.device_mesh, tensor.placements)

    def _over(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        from phalanx.tensor.core._dtensor import wrap

        tensor = cast("DTensor", self)
        return wrap(function(fresh(tensor).detach()), tensor._spec)


def _slices(box: HeldBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
