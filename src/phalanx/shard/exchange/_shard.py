"""Shard: one piece of a sharded tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.shard.layout._metadata import ShardMetadata
from phalanx.shard.layout._remote_device import RemoteDevice


@dataclass(slots=True)
class Shard:
    """A local tensor and where it belongs in the global tensor."""

    tensor: Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if list(self.tensor.shape) != self.metadata.shard_sizes:
            raise ValueError(
                f"Shard tensor size does not match with metadata.shard_sizes: the tensor has "
                f"{list(self.tensor.shape)}, {self.metadata} has {self.metadata.shard_sizes}"
            )
        placement = self.metadata.placement
        if placement is not None and placement.device() != self.tensor.device:
            raise ValueError(
                f"Local shard tensor device does not match with local Shard's placement: the tensor is on "
                f"{self.tensor.device}, the placement is {placement}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """Return a shard of ``rank`` that begins at ``shard_offsets``; size and device are the tensor's."""
        placement = RemoteDevice(f"rank:{rank}/{tensor.device}")
        return cls(tensor, ShardMetadata(shard_offsets, tensor.shape, placement))
