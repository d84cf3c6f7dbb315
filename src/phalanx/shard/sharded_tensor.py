"""Sharded tensors and their factories under the module name that torch's users import them from."""

from __future__ import annotations

from phalanx.shard.exchange._shard import Shard
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from phalanx.shard.ops._custom_ops import custom_sharded_op_impl
from phalanx.shard.plan._shard_module import pre_load_state_dict_hook, state_dict_hook
from phalanx.shard.tensor._factories import empty, full, init_from_local_shards, ones, rand, randn, zeros
from phalanx.shard.tensor._tensor import ShardedTensor

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "state_dict_hook",
    "zeros",
]
