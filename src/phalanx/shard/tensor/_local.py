"""Agrees on a tensor that every rank has shards of: checks of the local shards, then of all ranks' together.

Owns ``init_from_local_shards``' checks. Any number of tensors needs one exchange of metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._groups import owner_of
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from phalanx.shard.tensor._sharding_spec import check_cover, check_no_overlap


def size_or_none(size: Sequence[Any]) -> torch.Size | None:
    """Return the size, or None where a dim is given as None: all of them then follow from the shards, as in torch."""
    return None if any(dim is None for dim in size) else flatten_size(size)


def flatten_size(size: Sequence[Any]) -> torch.Size:
    """From ``3, 4`` or ``[3, 4]``."""
    dims = list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)
    if not all(isinstance(dim, int) for dim in dims):
        raise TypeError(f"size has to be a sequence of ints, found: {dims}")
    return torch.Size(dims)


def check_plain(tensor: Tensor, rank: int) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{rank}!")
    if not tensor.is_contiguous():
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported: a local shard of rank {rank} of size "
            f"{tuple(tensor.shape)} has strides {tensor.stride()}; call .contiguous() on it"
        )


def _traits(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
        "pin_memory": tensor.is_pinned(),
    }


def describe_local(shards: Sequence[Shard], size: torch.Size | None, group: Group) -> dict[str, Any]:
    """Return what this rank tells the others; raises ValueError for a mistake that it can see alone."""
    rank = group.ranks[group.rank]
    for shard in shards:
        check_plain(shard.tensor, rank)
        owner = group.ranks[owner_of(shard.metadata, group)]
        if owner != rank:
            raise ValueError(
                f"Local shard metadata's rank does not match with the rank in its process group: this is rank {rank}, "
                f"the shard {shard.metadata} is placed on rank {owner}"
            )
        for name, value in _traits(shard.tensor).items():
            first = _traits(shards[0].tensor)[name]
            if value != first:
                raise ValueError(
                    f"Local shards' tensor {name} property need to be the same on rank:{rank}! "
                    f"Found one local shard tensor {name}={first}, the other local shard tensor {name}={value}."
                )
    return {
        "size": None if size is None else list(size),
        "shards": [shard.metadata.to_json() for shard in shards],
        "traits": _traits(shards[0].tensor) if shards else None,
    }


def agree(described: Sequence[dict[str, Any]]) -> ShardedTensorMetadata:
    """Put the metadata together from what all ranks told, in their order; ValueError naming the ranks that differ."""
    holders = [(rank, told) for rank, told in enumerate(described) if told["traits"] is not None]
    if not holders:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    first_rank, first = holders[0]
    for rank, told in holders[1:]:
        wanted = {"global_size": first["size"], **first["traits"]}
        for name, value in {"global_size": told["size"], **told["traits"]}.items():
            if value != wanted[name]:
                raise ValueError(
                    f"ShardedTensor {name} property does not match from different ranks! Found {name}={wanted[name]} "
                    f"on rank:{first_rank}, and {name}={value} on rank:{rank}."
                )
    shards = [ShardMetadata.from_json(entry) for _, told in holders for entry in told["shards"]]
    size = first["size"]
    if size is None:
        ends = [[at + n for at, n in zip(s.shard_offsets, s.shard_sizes, strict=True)] for s in shards]
        size = [max(column) for column in zip(*ends, strict=True)]
    check_no_overlap(shards)
    check_cover(shards, size)
    traits = first["traits"]
    properties = TensorProperties(
        dtype=getattr(torch, traits["dtype"].removeprefix("torch.")),
        requires_grad=traits["requires_grad"],
        pin_memory=traits["pin_memory"],
    )
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def check_against(shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: Group) -> None:
    """That this rank's shards are the ones that the metadata gives it."""
    rank = group.ranks[group.rank]
    if not metadata.shards_metadata:
        raise ValueError("shards_metadata must not be empty!")
    mine = [entry for entry in metadata.shards_metadata if owner_of(entry, group) == group.rank]
    if len(shards) != len(mine):
        raise RuntimeError(
            f"Number of local shards ({len(shards)}) does not match number of local shards metadata in "
            f"sharded_tensor_metadata ({len(mine)}) on rank ({rank})"
        )
    properties = metadata.tensor_properties
    if properties.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, found {properties.layout}")
    wanted = {
        "dtype": str(properties.dtype),
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
    }
    for shard, entry in zip(shards, mine, strict=True):
        check_plain(shard.tensor, rank)
        if shard.metadata.box != entry.box:
            raise ValueError(
                f"rank {rank}: local shard {shard.metadata} is not the one of the global metadata, {entry}"
            )
        for name, value in _traits(shard.tensor).items():
            if value != wanted[name]:
                raise ValueError(
                    f"Local shards' tensor {name} property is incompatible with tensor property on rank {rank}: "
                    f"tensor property {name}={wanted[name]}, local shard tensor {name}={value}."
                )
    check_no_overlap(metadata.shards_metadata)
    check_cover(metadata.shards_metadata, metadata.size)
