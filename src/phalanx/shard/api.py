"""Sharding of modules and parameters under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.shard.exchange._groups import _get_current_process_group, load_with_process_group
from phalanx.shard.plan._shard_module import (
    _collect_local_shard,
    _reshard_output,
    _shard_tensor,
    shard_module,
    shard_parameter,
)

__all__ = [
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]
