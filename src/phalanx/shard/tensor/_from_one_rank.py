"""Distributes tensors of one rank as shards to all: any number of tensors, checked and sent together.

Phases: (1) every rank builds the layouts; (2) one exchange of a digest shows that all mean the same, and only if not,
a second one finds the first difference; (3) the data goes out from the source rank in rounds of bounded size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._exchange import RankBox, TensorMove, exchange, pieces_of, plan_copies
from phalanx.shard.exchange._gather import ROUND_BYTES
from phalanx.shard.exchange._groups import as_group, check_rank_in_group
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.layout._boxes import Box
from phalanx.shard.layout._metadata import ShardedTensorMetadata, TensorProperties
from phalanx.shard.tensor._sharding_spec import ShardingSpec, spec_key
from phalanx.shard.tensor._tensor import ShardedTensor


class Request(NamedTuple):
    """Shard ``tensor`` by ``spec``; the name is for messages."""

    name: str
    tensor: Tensor
    spec: ShardingSpec


def distribute_one(
    tensor: Tensor, spec: ShardingSpec, src_rank: int = 0, process_group: Any = None, *, verify: bool = False
) -> ShardedTensor:
    group = as_group(process_group)
    return distribute_many([Request("tensor", tensor, spec)], src_rank, group, verify=verify)[0]


def distribute_many(
    requests: Sequence[Request], src_rank: int, group: Group, *, verify: bool = True
) -> list[ShardedTensor]:
    """Collective. ``verify`` compares requests and source across the ranks first, in a fixed number of collectives."""
    check_rank_in_group(group, "src_rank", src_rank)
    metadatas = [_metadata(request) for request in requests]
    if verify:
        _check_same(group, src_rank, requests, metadatas)
    made: list[ShardedTensor] = []
    moves: list[TensorMove] = []
    pending = 0
    for request, metadata in zip(requests, metadatas, strict=True):
        tensor, move = _plan(request, metadata, src_rank, group)
        made.append(tensor)
        if moves and pending + move.nbytes() > ROUND_BYTES:
            exchange(group, moves)
            moves, pending = [], 0
        moves.append(move)
        pending += move.nbytes()
    exchange(group, moves)
    for tensor in made:
        tensor.requires_grad_(tensor.requires_grad)
    return made


def _metadata(request: Request) -> ShardedTensorMetadata:
    if not request.tensor.is_contiguous():
        raise ValueError(
            f"{request.name} is not a contiguous Tensor: its strides are {request.tensor.stride()}; "
            f"call .contiguous() on it first"
        )
    properties = TensorProperties.create_from_tensor(request.tensor)
    try:
        return request.spec.build_metadata(request.tensor.size(), properties)
    except ValueError as error:
        raise ValueError(f"{request.name}: {error}") from error


def _plan(
    request: Request, metadata: ShardedTensorMetadata, src_rank: int, group: Group
) -> tuple[ShardedTensor, TensorMove]:
    sources = [RankBox(src_rank, Box.of_size(metadata.size))]
    targets = pieces_of(metadata.shards_metadata, group)
    dtype = metadata.tensor_properties.dtype
    shards, local_targets = [], {}
    for position, (piece, entry) in enumerate(zip(targets, metadata.shards_metadata, strict=True)):
        if piece.rank == group.rank:
            assert entry.placement is not None, "pieces_of has asked for it"
            local = torch.empty(entry.shard_sizes, dtype=dtype, device=entry.placement.device())
            shards.append(Shard(local, entry))
            local_targets[position] = local
    local_sources = {0: request.tensor} if group.rank == src_rank else {}
    copies = plan_copies(sources, targets)
    tensor = ShardedTensor._wrap(shards, metadata, request.spec, group)
    return tensor, TensorMove(dtype, sources, targets, copies, local_sources, local_targets)


def _check_same(
    group: Group, src_rank: int, requests: Sequence[Request], metadatas: Sequence[ShardedTensorMetadata]
) -> None:
    said = [src_rank, [_said(*pair) for pair in zip(requests, metadatas, strict=True)]]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    if len(set(group.all_gather_values(digest))) == 1:
        return
    heard = group.all_gather_values(said)
    for rank, (other_src, others) in enumerate(heard):
        if other_src != src_rank:
            raise ValueError(
                f"src_rank={src_rank} on rank: {group.rank} does not match with src_rank={other_src} on rank: {rank}; "
                f"pass the same src_rank on all ranks"
            )
        if len(others) != len(requests):
            raise ValueError(
                f"{len(requests)} parameters to shard on rank: {group.rank}, but {len(others)} on rank: {rank}; "
                f"all ranks need the same plan"
            )
        for request, mine, theirs in zip(requests, said[1], others, strict=True):  # type: ignore[call-overload]  # a list
            for what, own, other in zip(("name", "size", "dtype", "sharding_spec"), mine, theirs, strict=False):
                if own != other:
                    raise ValueError(
                        f"{request.name}: {what}={own} on rank: {group.rank} does not match with {what}={other} on "
                        f"rank: {rank}; all ranks need the same plan"
                    )
    raise ValueError(f"rank {group.rank}: the ranks disagree on what to shard, see the errors of the others")


def _said(request: Request, metadata: ShardedTensorMetadata) -> list[Any]:
    return [request.name, list(metadata.size), str(request.tensor.dtype), spec_key(request.spec, metadata)]
