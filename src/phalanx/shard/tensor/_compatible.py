"""Whether two sharded tensors lie alike, and which memory formats shards may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from phalanx.shard.tensor._tensor import ShardedTensor


def check_format(memory_format: torch.memory_format | None) -> None:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported, got {memory_format}"
        )


def same_layout(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Whether the shards of both lie in the same boxes on the same ranks."""
    if a._metadata.shards_metadata is b._metadata.shards_metadata and a._process_group is b._process_group:
        return True
    return (
        a._metadata.size == b._metadata.size
        and a._process_group.ranks == b._process_group.ranks
        and a._metadata.shards_metadata == b._metadata.shards_metadata
    )
