"""Gathers full tensors on one rank: any number of them, in rounds of bounded size, into memory or into a file.

No metadata travels: every rank knows every layout. A round moves at most ``max_bytes`` (or one element).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._exchange import (
    Copy,
    RankBox,
    TensorMove,
    exchange,
    pieces_of,
    plan_copies,
    split_copies,
)
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.files._safetensors import mapped_file
from phalanx.shard.layout._boxes import Box
from phalanx.shard.layout._metadata import ShardedTensorMetadata

ROUND_BYTES = 64 << 20


class GatheredTensor(NamedTuple):
    """A tensor to gather: its layout, this rank's shards, and on the destination where to put it (None: nowhere)."""

    metadata: ShardedTensorMetadata
    shards: Sequence[Shard]
    out: Tensor | None


def gather_tensors(group: Group, tensors: Sequence[GatheredTensor], dst: int, max_bytes: int | None = None) -> None:
    """Fill ``out`` of every tensor on rank ``dst`` of the group."""
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"rank {group.rank}: gather with max_bytes={max_bytes}; expected at least 1")
    cap = max_bytes or ROUND_BYTES
    moves: list[TensorMove] = []
    pending = 0
    for tensor in tensors:
        move = _move(group, tensor, dst)
        itemsize = move.dtype.itemsize
        for copies in split_copies(move.copies, max(1, cap // itemsize)):
            nbytes = itemsize * sum(copy.box.volume for copy in copies)
            if moves and pending + nbytes > cap:
                exchange(group, moves)
                moves, pending = [], 0
            moves.append(_some_of(move, copies))
            pending += nbytes
    exchange(group, moves)


def gather_to_file(
    group: Group,
    metadata: ShardedTensorMetadata,
    shards: Sequence[Shard],
    path: Path,
    max_bytes: int | None,
) -> None:
    """Gather a tensor on this rank into a new safetensors file; the other ranks call ``gather_tensors``.

    They do not know of the file. If it cannot be made, this rank takes what they send, round by round, and then raises:
    otherwise they would wait for it until the group's timeout.
    """
    with ExitStack() as stack:
        try:
            described = {"tensor": (metadata.tensor_properties.dtype, metadata.size)}
            mapped = stack.enter_context(mapped_file(path, described))["tensor"]
        except Exception:
            gather_tensors(group, [GatheredTensor(metadata, shards, None)], group.rank, max_bytes)
            raise
        gather_tensors(group, [GatheredTensor(metadata, shards, mapped)], group.rank, max_bytes)


def _some_of(move: TensorMove, copies: Sequence[Copy]) -> TensorMove:
    return TensorMove(move.dtype, move.sources, move.targets, copies, move.local_sources, move.local_targets)


def _move(group: Group, tensor: GatheredTensor, dst: int) -> TensorMove:
    sources = pieces_of(tensor.metadata.shards_metadata, group)
    targets = [RankBox(dst, Box.of_size(tensor.metadata.size))]
    mine = [position for position, piece in enumerate(sources) if piece.rank == group.rank]
    local_sources = {p: shard.tensor for p, shard in zip(mine, tensor.shards, strict=True)}
    local_targets = {} if tensor.out is None else {0: tensor.out}
    dtype = tensor.metadata.tensor_properties.dtype
    return TensorMove(dtype, sources, targets, plan_copies(sources, targets), local_sources, local_targets)


def check_out(rank: int, dst: int, size: Sequence[int], out: Any) -> None:
    """torch's rules: ``out`` on the destination and nowhere else, and of the right size."""
    if rank != dst:
        if out is not None:
            raise ValueError(
                f"rank {rank}: Argument ``dst_tensor`` (out) must NOT be specified on ranks other than {dst}"
            )
        return
    if out is None:
        raise ValueError(f"Argument ``dst_tensor`` (out) must be specified on destination rank {dst}")
    if tuple(out.shape) != tuple(size):
        raise ValueError(f"Argument ``dst_tensor`` (out) have size {tuple(out.shape)}, but should be {tuple(size)}")
