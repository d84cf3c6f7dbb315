"""The side of a ShardedTensor that ``torch.distributed.checkpoint`` speaks with (see ``comm.torch_interop._dcp``).

Owns ``HeldShards``: each local shard is one box of the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from phalanx.comm.torch_interop._dcp import HeldBox, Spread

if TYPE_CHECKING:
    from phalanx.shard.tensor._tensor import ShardedTensor


class HeldShards(Spread):
    """Part of ``ShardedTensor``."""

    __slots__ = ()

    def _held_boxes(self, purpose: str) -> list[HeldBox]:
        return [
            HeldBox(
                tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), shard.tensor.detach()
            )
            for shard in cast("ShardedTensor", self).local_shards()
        ]

    def _whole(self) -> Tensor:
        tensor = cast("ShardedTensor", self)
        group = tensor._process_group
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        tensor.gather(0, whole if group.rank == 0 else None)
        if whole.numel():
            group.broadcast(whole, 0)
        return whole

    def _cut_from(self, whole: Tensor) -> Tensor:
        tensor = cast("ShardedTensor", self)
        for box in tensor._held_boxes("load"):
            where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            box.tensor.copy_(whole[where])
        return tensor

    def _distributed_from(self, whole: Tensor) -> Tensor:
        from phalanx.shard.tensor._distribute import distribute_one  # it makes sharded tensors

        tensor = cast("ShardedTensor", self)
        return distribute_one(whole.detach().contiguous(), tensor.sharding_spec(), 0, tensor._process_group)

    def _over(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        tensor = cast("ShardedTensor", self)
        return tensor._with_tensors([function(shard.tensor.detach()) for shard in tensor.local_shards()])
