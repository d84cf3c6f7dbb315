"""The optimizer of sharded parameters under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.shard.plan._optim import ShardedOptimizer, named_params_with_sharded_tensor

__all__ = [
    "ShardedOptimizer",
    "named_params_with_sharded_tensor",
]
