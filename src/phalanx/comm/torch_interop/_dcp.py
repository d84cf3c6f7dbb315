"""Answers what ``torch.distributed.checkpoint`` (DCP) asks of a tensor whose data is spread over ranks.

Owns ``Spread``, which such tensors inherit: DCP's protocol (write items, chunks, one chunk's tensor) in terms of boxes
of the global tensor; and what data parallelism asks, which trains this rank's part.
The only file that imports DCP, and only when DCP itself asks. How torch's helpers for state
dicts come to treat our tensors as distributed ones is in ``_dcp_state_dicts``.

Invariants: the boxes of all ranks cover the tensor; two boxes are the same or do not overlap, so that DCP, which writes
one of several chunks with the same key and offsets, writes each element once. A rank that holds nothing has no box; of
a tensor without elements every rank has one, which says that it exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HeldBox(NamedTuple):
    """A box of the global tensor, and this rank's memory of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor


class TrainedShard(NamedTuple):
    """This rank's part of a parameter, as autograd sees it."""

    tensor: Tensor
    """The plain tensor that gets the gradient."""
    where: str
    """Which part of which layout it is: equal on ranks that hold replicas of each other."""


class Spread:
    """Abstract: a tensor subclass whose ranks hold boxes of it."""

    __slots__ = ()

    def _held_boxes(self, purpose: str) -> list[HeldBox]:
        """Return this rank's boxes, without a graph; ``purpose`` is ``save`` or ``load``. Raises if it has no such
        parts."""
        raise NotImplementedError

    def _whole(self) -> Tensor:
        """Collective: all of it, as a plain tensor on every rank."""
        raise NotImplementedError

    def _cut_from(self, whole: Tensor) -> Tensor:
        """Return one like this, with the values of ``whole``, which every rank has. No collective; in place unless on
        meta."""
        raise NotImplementedError

    def _distributed_from(self, whole: Tensor) -> Tensor:
        """Collective: one like this, with the values of the first rank's ``whole``."""
        raise NotImplementedError

    def _trained_part(self) -> TrainedShard:
        """Return what data parallelism trains of it on this rank; raises ``TypeError`` if autograd has no such part."""
        raise TypeError(f"a {type(self).__name__} has no local tensor that autograd accumulates a gradient for")

    def _over(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the same layout over ``function`` of each local tensor."""
        raise NotImplementedError

    # ---- what DCP calls

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        # start-up: only those who use DCP need it
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        size = _size(self)
        try:
            boxes = _nonempty(size, self._held_boxes("save"))
        except ValueError as error:
            raise ValueError(f"{fqn}: {error}") from None
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=TensorProperties.create_from_tensor(box.tensor),
                    size=size,
                ),
            )
            for box in boxes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # start-up, as above

        try:
            boxes = _nonempty(_size(self), self._held_boxes("load"))
        except ValueError as error:  # which DCP would replace by a remark on bytes
            raise RuntimeError(str(error)) from None
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        boxes = _nonempty(_size(self), self._held_boxes("save"))
        for box in boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return box.tensor
        raise ValueError(
            f"{index.fqn}: this rank holds no part that begins at {index.offset and tuple(index.offset)}; "
            f"it holds those at {[box.offsets for box in boxes]}"
        )


def _size(tensor: Any) -> torch.Size:
    size: torch.Size = tensor.shape
    return size


def _nonempty(size: Sequence[int], boxes: list[HeldBox]) -> list[HeldBox]:
    """DCP knows a tensor by its chunks: without one, a tensor without elements would be missing in the checkpoint."""
    if math.prod(size) == 0:
        return [HeldBox((0,) * len(size), tuple(size), box.tensor.new_empty(size)) for box in boxes[:1]]
    return [box for box in boxes if math.prod(box.sizes)]
