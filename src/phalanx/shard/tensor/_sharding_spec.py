"""Sharding specs: how a tensor of any size is sharded and where the shards live.

Owns ``ShardingSpec``, ``ChunkShardingSpec``, ``EnumerableShardingSpec`` and their checks. Specs are values: they are
compared, sent as JSON, and never communicate, except through ``shard``, which hands over to ``_from_one_rank``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from phalanx.shard.layout._boxes import chunk_lengths, find_overlap
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from phalanx.shard.layout._remote_device import RemoteDevice
from phalanx.shard.layout._tiling import find_fault

if TYPE_CHECKING:
    from phalanx.shard.tensor._tensor import ShardedTensor


class PlacementSpec(ABC):  # noqa: B024  (a root for users' own placements; it asks for nothing)
    """Where something lives; users may derive their own."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """On one device."""

    device: RemoteDevice

    def __post_init__(self) -> None:
        self.device = RemoteDevice.of(self.device)


class ShardingSpec(ABC):
    """Says how to shard a tensor. Derive from it for a layout of your own: ``build_metadata`` is all that it needs."""

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the shards of a tensor of this size."""

    def shard(self, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> ShardedTensor:
        """Shard ``tensor`` of rank ``src_rank`` of the group and send every rank its shards."""
        return ShardingSpec._distribute(tensor, self, src_rank, process_group)

    _distribute: ClassVar[Callable[..., ShardedTensor]]
    """``_from_one_rank.distribute_one``, put here by ``phalanx.shard``: it makes tensors, which are made of specs."""


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """Chunks along one dim, one per placement, as ``torch.chunk`` does.

    >>> ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    ChunkShardingSpec(dim=0, placements=[rank:0/cpu, rank:1/cpu])
    """

    dim: int
    placements: list[Any]

    def __post_init__(self) -> None:
        self._verify_dim(self.dim)
        self.placements = [RemoteDevice.of(placement) for placement in self.placements]

    @staticmethod
    def _verify_dim(dim: Any) -> None:
        if isinstance(dim, str):
            raise NotImplementedError(f"ChunkShardingSpec(dim={dim!r}): named dims are not supported; give its number")
        if not isinstance(dim, int):
            raise ValueError(f"ChunkShardingSpec: the sharding dim must be an integer, found {dim!r}")

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        self._verify_dim(self.dim)
        num_dims = len(tensor_sizes)
        if not -num_dims <= self.dim < num_dims:
            raise ValueError(f"Invalid sharding dim {self.dim} for a tensor of size {tuple(tensor_sizes)}")
        if not self.placements:
            raise ValueError("ChunkShardingSpec has no placements; give one per chunk, e.g. ['rank:0/cpu']")
        dim = self.dim % num_dims
        step, lengths = chunk_lengths(tensor_sizes[dim], len(self.placements))
        shards = []
        for index, (length, placement) in enumerate(zip(lengths, self.placements, strict=True)):
            offsets, sizes = [0] * num_dims, list(tensor_sizes)
            offsets[dim], sizes[dim] = step * index, length
            shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Any layout: every shard is listed."""

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError("EnumerableShardingSpec of an empty list of shards; give at least one")
        ranks = {len(shard.shard_offsets) for shard in self.shards}
        if len(ranks) > 1:
            raise ValueError(f"Found inconsistent ranks for shards: {sorted(ranks)}; all need the same number of dims")
        check_no_overlap(self.shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        check_cover(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def check_no_overlap(shards: Sequence[ShardMetadata]) -> None:
    """Raise ValueError naming two shards that share an element."""
    boxes = [shard.box for shard in shards]
    pair = find_overlap(boxes)
    if pair is not None:
        raise ValueError(f"Shards {shards[pair[0]]} and {shards[pair[1]]} overlap")


def check_cover(shards: Sequence[ShardMetadata], sizes: Sequence[int]) -> None:
    """Raise ValueError unless the shards (known not to overlap) fill a tensor of ``sizes`` exactly."""
    if not shards:
        raise ValueError(f"no shards of a tensor of size {tuple(sizes)}; give at least one")
    rank = len(shards[0].shard_offsets)
    if rank != len(sizes):
        raise ValueError(f"Rank of tensor is {len(sizes)} (size {tuple(sizes)}), but shards rank is {rank}")
    for shard in shards:
        for dim, (offset, length) in enumerate(zip(shard.shard_offsets, shard.shard_sizes, strict=True)):
            if length > sizes[dim] or (offset + length > sizes[dim] and shard.box.volume):
                raise ValueError(
                    f"Shard offset {offset} and length {length} exceeds tensor dim: {sizes[dim]} (dim {dim}) "
                    f"for shard {shard}"
                )
    total, wanted = sum(shard.box.volume for shard in shards), prod(sizes)
    if total != wanted:
        fault = find_fault([shard.box for shard in shards], sizes)
        where = "" if fault is None or fault[1] else f"; e.g. nothing holds offsets {list(fault[0])}"
        raise ValueError(
            f"Total volume of shards: {total} does not match tensor volume: {wanted} of size {tuple(sizes)}{where}"
        )


def infer_spec(shards: Sequence[ShardMetadata], sizes: Sequence[int]) -> ShardingSpec:
    """Return a ``ChunkShardingSpec`` if it shards exactly like this, else an ``EnumerableShardingSpec``."""
    placed = len(shards) > 1 and all(shard.placement is not None for shard in shards)
    for dim in range(len(sizes)) if placed else ():
        if len({shard.shard_offsets[dim] for shard in shards}) == len(shards):
            ordered = sorted(shards, key=lambda shard, dim=dim: shard.shard_offsets[dim])  # type: ignore[misc]  # a default binds dim
            spec = ChunkShardingSpec(dim, [shard.placement for shard in ordered])
            wanted = spec.build_metadata(torch.Size(sizes), TensorProperties()).shards_metadata
            if wanted == ordered:
                return spec
    return EnumerableShardingSpec(list(shards))


def spec_key(spec: ShardingSpec, metadata: ShardedTensorMetadata) -> list[Any]:
    """Return what two ranks compare to see that they mean the same layout; JSON."""
    return [type(spec).__qualname__, [shard.to_json() for shard in metadata.shards_metadata]]
