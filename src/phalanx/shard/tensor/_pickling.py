"""Pickles sharded tensors: each rank its own shards, which can only come back to the same rank.

Owns what is remembered of the place and the checks on return. To load on another number of ranks, see ``_save``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._groups import _get_current_process_group, as_group, owner_of
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.layout._metadata import ShardedTensorMetadata
from phalanx.shard.tensor._sharding_spec import ShardingSpec

if TYPE_CHECKING:
    from phalanx.shard.tensor._tensor import ShardedTensor


@dataclass(frozen=True)
class ProcessGroupState:
    """Where a tensor was when it was pickled; it can only come back to the same place."""

    local_rank: int
    global_rank: int
    local_world_size: int

    @classmethod
    def of(cls, group: Group) -> ProcessGroupState:
        return cls(group.rank, group.ranks[group.rank], group.size)


def rebuild(
    cls: type[ShardedTensor],
    tensors: list[Tensor],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    place: ProcessGroupState,
    is_param: bool,
) -> ShardedTensor:
    try:
        group = as_group(_get_current_process_group())
    except RuntimeError as error:
        raise RuntimeError(
            "Need to initialize the default process group (phalanx.init(), or a load_with_process_group block) "
            "before loading ShardedTensor"
        ) from error
    now = ProcessGroupState.of(group)
    for text, field in (
        ("Local rank", "local_rank"),
        ("Global rank", "global_rank"),
        ("Local world size", "local_world_size"),
    ):
        saved, found = getattr(place, field), getattr(now, field)
        if saved != found:
            raise RuntimeError(
                f"{text} at save time was {saved}, but at load time was {found}; to load at another size, "
                f"use phalanx.shard.save and load"
            )
    mine = [entry for entry in metadata.shards_metadata if owner_of(entry, group) == group.rank]
    grads = metadata.tensor_properties.requires_grad
    shards = [Shard(t.requires_grad_(grads), entry) for t, entry in zip(tensors, mine, strict=True)]
    result = cls._wrap(shards, metadata, spec, group)
    if is_param:
        result._is_param = True  # how torch marks a parameter that is a subclass
    return result
