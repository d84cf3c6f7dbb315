"""Distributed tensors: a global shape, laid out over a device mesh by placements; single-device code runs on them."""

from __future__ import annotations

from phalanx.comm import DeviceMesh, init_device_mesh
from phalanx.tensor._distribute import distribute_module, distribute_tensor
from phalanx.tensor._dtensor import DTensor
from phalanx.tensor._modes import (
    NoShardingRule,
    SurpriseCommunication,
    communication_mode,
    fallback_counts,
    fallback_policy,
    implicit_replication,
)
from phalanx.tensor._placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
