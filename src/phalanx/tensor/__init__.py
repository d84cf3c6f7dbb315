"""Distributed tensors: a global shape, laid out over a device mesh by placements; single-device code runs on them.

Importing this package wraps ``torch.autograd.Function.apply`` (so that users' Functions work on DTensors), torch's
functions that seed, save and restore random state (so that they include that of DTensors) and those that trace (so that
they refuse DTensors), has nested activation checkpoints keep local tensors, tells ``torch.load`` which names are
harmless, and has torch's helpers for distributed checkpoints know DTensors (once they are imported); see
``_autograd_function.py``, ``_state.py``, ``_init.py``, ``_torch_functions.py``, ``_checkpoint.py``, ``_load.py`` and
``phalanx.comm.torch_interop._dcp_state_dicts``.
"""

from __future__ import annotations

from phalanx.comm import DeviceMesh, init_device_mesh
from phalanx.comm.torch_interop import _dcp_state_dicts
from phalanx.tensor._factories import arange, empty, full, ones, rand, randn, randperm, zeros
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.core._modes import (
    NoShardingRule,
    SurpriseCommunication,
    communication_mode,
    fallback_counts,
    fallback_policy,
    implicit_replication,
)
from phalanx.tensor.dispatch._distribute import distribute_module, distribute_tensor
from phalanx.tensor.layout._placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from phalanx.tensor.patches import (
    _autograd_function,
    _checkpoint,
    _grouping,
    _load,
    _operators,
    _torch_functions,
)
from phalanx.tensor.random import _init, _state
from phalanx.tensor.random._state import get_rng_state, manual_seed, set_rng_state
from phalanx.tensor.redistribute import _log

_checkpoint.install()
_dcp_state_dicts.install()
_torch_functions.install()
_autograd_function.install()
_grouping.install()
_load.install()
_operators.install()
_state.install()
_init.install()
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
