"""Converts between sharded tensors and DTensors, and runs every operation as one on DTensors.

A tensor sharded along one dim over the ranks of its group, in their order, converts without moving a byte; any other
layout is resharded to that first. Conversions are differentiable. In operations, plain tensors stand for the same
values on every rank, and results that are not sharded come back as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from phalanx._torch_private import tree_map_only
from phalanx.comm import DeviceMesh, Group, current_group, use_group
from phalanx.shard.exchange._reshard import reshard_shards
from phalanx.shard.exchange._shard import Shard as LocalShard
from phalanx.shard.layout._boxes import Box, chunk_lengths
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from phalanx.shard.ops._shard_by_shard import is_in_place
from phalanx.shard.tensor._sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from phalanx.shard.tensor._tensor import ShardedTensor
from phalanx.tensor import DTensor, Shard, implicit_replication
from phalanx.tensor.layout._placement import ranges_of


def to_dtensor(tensor: ShardedTensor) -> DTensor:
    """Return the same values as a DTensor on a 1-d mesh of the tensor's group; gradients flow back to the shards.

    >>> (to_dtensor(weight) @ x).full_tensor()       # doctest: +SKIP
    """
    group, metadata = tensor._process_group, tensor.metadata()
    if not metadata.size:
        raise ValueError("a 0-dim ShardedTensor has no dim to shard; gather() it")
    dim = _cut_dim(metadata)
    spec = _in_order(dim, group, tensor.device)
    wanted = spec.build_metadata(metadata.size, metadata.tensor_properties)
    if metadata.shards_metadata == wanted.shards_metadata:
        local = tensor.local_shards()[0].tensor
    else:
        moved = reshard_shards(tensor.local_shards(), metadata, wanted, group, connect_leaves=True)
        local = moved[0].tensor
    with use_group(group):
        mesh = DeviceMesh(tensor.device.type, list(range(group.size)))  # equal to every other one made on this group
    return DTensor.from_local(local, mesh, [Shard(dim)], shape=tuple(metadata.size))


def _cut_dim(metadata: ShardedTensorMetadata) -> int:
    """Find the dim with the most shards."""
    shards = metadata.shards_metadata
    return max(range(len(metadata.size)), key=lambda dim: len({shard.shard_offsets[dim] for shard in shards}))


def _in_order(dim: int, group: Group, device: torch.device) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{device}" for rank in group.ranks])


def from_dtensor(tensor: DTensor) -> ShardedTensor:
    """Return the same values as a ShardedTensor that shares the local memory; of replicas, the first rank's count.

    Raises:
        ValueError: the DTensor is partial somewhere, or has placements other than ``Shard``: redistribute it first.
    """
    mesh, local = tensor.device_mesh, tensor.to_local()
    group = mesh_group(mesh)
    metadata = dtensor_metadata(tensor, group)
    shards = metadata.shards_metadata
    own = [s for s in shards if s.placement and s.placement.rank() == group.ranks[group.rank]]
    if len(own) == 1:
        mine = [LocalShard(local, own[0])]
    else:  # none, of a replica that does not count, or several, of a strided shard
        pieces = tensor._held_boxes("save") if own else []
        mine = [LocalShard(piece.tensor, s) for piece, s in zip(pieces, own, strict=True)]
    placement = tensor.placements[0]
    if mesh.ndim == 1 and type(placement) is Shard:
        spec: ShardingSpec = ChunkShardingSpec(placement.dim, [shard.placement for shard in shards])
    else:
        spec = EnumerableShardingSpec(shards)
    return ShardedTensor._wrap(mine, metadata, spec, group)


def dtensor_metadata(tensor: DTensor, group: Group) -> ShardedTensorMetadata:
    """Say which boxes of a DTensor the ranks of its mesh's ``group`` hold; of replicas, the first rank's count."""
    mesh, device = tensor.device_mesh, tensor._local.device
    coordinates = list(product(*(range(n) for n in mesh.shape)))
    shards = [
        ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{device}")
        for rank, coordinate in zip(group.ranks, coordinates, strict=True)
        if is_first_replica(tensor, coordinate)
        for box in boxes_at(tensor, coordinate)
    ]
    properties = TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
    return ShardedTensorMetadata(shards, torch.Size(tensor.shape), properties)


def mesh_group(mesh: DeviceMesh) -> Group:
    """Return a group of all ranks of the mesh, in its order."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks, parent = mesh.mesh.flatten().tolist(), mesh._get_root_mesh()._root.parent or current_group()
    if ranks == list(range(parent.size)):
        return parent
    group = parent.subgroup(ranks)
    assert group is not None, "a rank outside the mesh holds no local tensor"
    return group


def is_first_replica(tensor: DTensor, coordinate: Sequence[int]) -> bool:
    """Return whether the rank there is the one that counts among those that hold the same."""
    return not any(c and p.is_replicate() for c, p in zip(coordinate, tensor.placements, strict=True))


def boxes_at(tensor: DTensor, coordinate: Sequence[int]) -> list[Box]:
    """Return the boxes of the global tensor that the rank at this coordinate of the mesh holds.

    It is one, which may be empty, but for strided shards: the rows that they leave need not be neighbours.
    """
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    for index, num_ranks, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard):
            raise ValueError(
                f"a DTensor placed {placement} has no shards; redistribute() it to Shard or Replicate first"
            )
        if type(placement) is not Shard:
            return _strided_boxes(tensor, coordinate)
        step, lengths = chunk_lengths(sizes[placement.dim], num_ranks)
        offsets[placement.dim] += step * index
        sizes[placement.dim] = lengths[index]
    return [Box(tuple(offsets), tuple(sizes))]


def _strided_boxes(tensor: DTensor, coordinate: Sequence[int]) -> list[Box]:
    spec = tensor._spec
    ranges = [ranges_of(length, spec.shards(dim, coordinate)) for dim, length in enumerate(spec.shape)]
    return [Box(tuple(start for start, _ in each), tuple(size for _, size in each)) for each in product(*ranges)]


def run_as_dtensor(func: Any, args: Any, kwargs: Any, first: ShardedTensor) -> Any:
    """Convert, run, convert back."""
    name = getattr(func, "__name__", str(func))
    if is_in_place(func) or kwargs.get("out") is not None:
        raise NotImplementedError(
            f"{name} in place on a ShardedTensor of {tuple(first.shape)}: only element-wise operations between equal "
            f"layouts work in place; use the version that returns a result"
        )

    def convert(tensor: ShardedTensor) -> DTensor:
        if tensor._process_group.ranks != first._process_group.ranks:
            raise ValueError(
                f"{name} of ShardedTensors on different groups: {tensor._process_group} and {first._process_group}"
            )
        return to_dtensor(tensor)

    args, kwargs = convert_sharded(convert, args, kwargs)
    with implicit_replication():
        result = func(*args, **kwargs)
    return tree_map_only(DTensor, _give_back, result)


def convert_sharded(convert: Callable[[ShardedTensor], Any], args: Any, kwargs: Any) -> Any:
    """Return the arguments with every sharded tensor converted; one that appears twice is converted once."""
    known: dict[int, Any] = {}

    def once(tensor: ShardedTensor) -> Any:
        if id(tensor) not in known:
            known[id(tensor)] = convert(tensor)
        return known[id(tensor)]

    return tree_map_only(ShardedTensor, once, (args, kwargs))


def _give_back(result: DTensor) -> Any:
    placement = result.placements[0]
    if type(placement) is Shard:
        return from_dtensor(result)
    return result.to_local() if placement.is_replicate() else result.full_tensor()
