"""The placements under the module name that torch's users import them from."""

from __future__ import annotations

from phalanx.tensor.layout._placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard

__all__ = ["MaskPartial", "Partial", "Placement", "Replicate", "Shard", "StridedShard"]

_MaskPartial = MaskPartial
_StridedShard = StridedShard
