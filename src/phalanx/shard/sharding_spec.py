"""Specs under the module name that torch's users import them from."""

from __future__ import annotations

from phalanx.shard.layout._metadata import ShardMetadata
from phalanx.shard.ops._custom_ops import custom_sharding_spec_op
from phalanx.shard.tensor._sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "custom_sharding_spec_op",
]
