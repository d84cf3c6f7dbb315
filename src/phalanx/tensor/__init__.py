"""Distributed tensors: a global shape, laid out over a device mesh by placements; single-device code runs on them.

Importing this package wraps ``torch.autograd.Function.apply`` (so that users' Functions work on DTensors), torch's
functions that seed, save and restore random state (so that they include that of DTensors) and those that trace (so that
they refuse DTensors), has nested activation checkpoints keep local tensors, tells ``torch.load`` which names are
harmless, and has torch's helpers for distributed checkpoints know DTensors (once they are imported); see
``_function.py``, ``_random.py``, ``_random_init.py``, ``_doors.py``, ``_checkpointing.py``, ``_loading.py`` and
``phalanx.comm._dcp_state_dicts``.
"""

from __future__ import annotations

from phalanx.comm import DeviceMesh, _dcp_state_dicts, init_device_mesh
from phalanx.tensor import (
    _checkpointing,
    _doors,
    _function,
    _grouping,
    _loading,
    _log,
    _operators,
    _random,
    _random_init,
)
from phalanx.tensor._distribute import distribute_module, distribute_tensor
from phalanx.tensor._dtensor import DTensor
from phalanx.tensor._factories import arange, empty, full, ones, rand, randn, randperm, zeros
from phalanx.tensor._modes import (
    NoShardingRule,
    SurpriseCommunication,
    communication_mode,
    fallback_counts,
    fallback_policy,
    implicit_replication,
)
from phalanx.tensor._placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from phalanx.tensor._random import get_rng_state, manual_seed, set_rng_state

_checkpointing.install()
_dcp_state_dicts.install()
_doors.install()
_function.install()
_grouping.install()
_loading.install()
_operators.install()
_random.install()
_random_init.install()
_log.configure()

__all__ = [
    "DTensor",
    "DeviceMesh",
    "MaskPartial",
    "NoShardingRule",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "SurpriseCommunication",
    "arange",
    "communication_mode",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "fallback_counts",
    "fallback_policy",
    "full",
    "get_rng_state",
    "implicit_replication",
    "init_device_mesh",
    "manual_seed",
    "ones",
    "rand",
    "randn",
    "randperm",
    "set_rng_state",
    "zeros",
]
