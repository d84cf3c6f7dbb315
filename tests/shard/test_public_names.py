"""The public names of the package; a change here is a change for users."""

from __future__ import annotations

import pytest

from phalanx import shard

pytestmark = pytest.mark.fast


def test_public_names_are_frozen() -> None:
    assert shard.__all__ == sorted(shard.__all__)
    assert all(hasattr(shard, name) for name in shard.__all__)
    assert set(shard.__all__) == set(NAMES.split())


NAMES = """
AutoPlan PlanReport auto_plan ShardedOptimizer named_params_with_sharded_tensor
Checkpoint CheckpointError load save save_full
ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec RemoteDevice Shard
ShardMetadata ShardedTensor ShardedTensorMetadata Sharder ShardingPlan ShardingPlanner ShardingSpec
TensorProperties _collect_local_shard _get_current_process_group _reshard_output _shard_tensor
custom_sharded_op_impl custom_sharding_spec_op empty from_dtensor full gather_state_dict
init_from_local_shards load_with_process_group ones pre_load_state_dict_hook rand randn shard_module
plain_inputs shard_parameter state_dict_hook to_dtensor zeros
"""
