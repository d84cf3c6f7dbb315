"""Distributed tensors: a global shape, laid out over a device mesh by placements; single-device code runs on them.

Importing this package changes torch from outside, so that users' Functions, activation checkpoints, random state,
``torch.load`` and distributed checkpoints know DTensors and tracers refuse them: ``patches/_install.py`` is the list.
"""

from __future__ import annotations

import warnings

from phalanx.comm import DeviceMesh, init_device_mesh
from phalanx.tensor._factories import arange, empty, full, ones, rand, randn, randperm, zeros
from phalanx.tensor.compile import _compilers
from phalanx.tensor.core._dtensor import DTensor, above
from phalanx.tensor.core._modes import (
    ImplicitCommunicationError,
    NoShardingRule,
    communication_mode,
    fallback_counts,
    fallback_policy,
    implicit_replication,
)
from phalanx.tensor.dispatch._distribute import distribute_module, distribute_tensor, redistribute
from phalanx.tensor.dispatch._from_local import from_local
from phalanx.tensor.layout._placement import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from phalanx.tensor.patches import _install
from phalanx.tensor.patches._handlers import find_handler
from phalanx.tensor.random._state import get_rng_state, manual_seed, set_rng_state
from phalanx.tensor.redistribute import _log

above.find_handler = find_handler
above.from_local = from_local
above.redistribute = redistribute
above.distribute = distribute_tensor
_install.install()
_compilers.install()
_log.configure()

__all__ = [
    "DTensor",
    "DeviceMesh",
    "ImplicitCommunicationError",
    "MaskPartial",
    "NoShardingRule",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
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


def __getattr__(name: str) -> object:
    """Find ``SurpriseCommunication``, which this release still knows as ``ImplicitCommunicationError``."""
    if name != "SurpriseCommunication":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "phalanx.tensor.SurpriseCommunication is ImplicitCommunicationError now; the next release drops the old name",
        DeprecationWarning,
        stacklevel=2,
    )
    return ImplicitCommunicationError
