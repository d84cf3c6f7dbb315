"""``Sharder`` under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.shard.plan._sharding_plan import Sharder

__all__ = [
    "Sharder",
]
