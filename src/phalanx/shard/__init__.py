"""Shards tensors by specs over the ranks of a group, and modules by plans."""

from __future__ import annotations

from phalanx.shard.checkpoint._checkpoint import Checkpoint
from phalanx.shard.checkpoint._full_files import save_full
from phalanx.shard.checkpoint._gather_state_dict import gather_state_dict
from phalanx.shard.checkpoint._load import load
from phalanx.shard.checkpoint._save import save
from phalanx.shard.exchange._groups import _get_current_process_group, load_with_process_group
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.files._index import CheckpointError
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from phalanx.shard.layout._remote_device import RemoteDevice
from phalanx.shard.ops._convert import from_dtensor, to_dtensor
from phalanx.shard.ops._custom_ops import custom_sharded_op_impl, custom_sharding_spec_op
from phalanx.shard.ops._dispatch import dispatch
from phalanx.shard.ops._plain import plain_inputs
from phalanx.shard.plan._auto_plan import AutoPlan, PlanReport, auto_plan
from phalanx.shard.plan._optim import ShardedOptimizer, named_params_with_sharded_tensor
from phalanx.shard.plan._shard_module import (
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    pre_load_state_dict_hook,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from phalanx.shard.plan._sharding_plan import Sharder, ShardingPlan, ShardingPlanner
from phalanx.shard.tensor._factories import empty, full, init_from_local_shards, ones, rand, randn, zeros
from phalanx.shard.tensor._from_one_rank import distribute_one
from phalanx.shard.tensor._sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)
from phalanx.shard.tensor._tensor import ShardedTensor

__all__ = [
    "AutoPlan",
    "Checkpoint",
    "CheckpointError",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "PlanReport",
    "RemoteDevice",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "auto_plan",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "from_dtensor",
    "full",
    "gather_state_dict",
    "init_from_local_shards",
    "load",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "plain_inputs",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "save",
    "save_full",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "to_dtensor",
    "zeros",
]

# The two calls that go up: a spec makes tensors, and a tensor runs operations.
ShardingSpec._distribute = distribute_one
ShardedTensor._dispatch = dispatch
