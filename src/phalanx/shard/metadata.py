"""``ShardMetadata`` under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.shard.layout._metadata import ShardMetadata

__all__ = [
    "ShardMetadata",
]
