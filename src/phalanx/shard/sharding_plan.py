"""Plans under the module name that torch's users import them from."""

from __future__ import annotations

from phalanx.shard.plan._sharding_plan import ShardingPlan, ShardingPlanner

__all__ = [
    "ShardingPlan",
    "ShardingPlanner",
]
