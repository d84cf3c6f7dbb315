"""Runs plain torch programs on our groups: the ``phalanx`` backend of ``torch.distributed``.

Owns how torch makes one. What torch then calls on it is in ``group._torch_calls``.
"""

from __future__ import annotations

from typing import Any

from phalanx.comm.group._group import Group
from phalanx.comm.stores import wrap_c10d_store
from phalanx.comm.transports._interface import GroupSpec


def create_process_group(common: Any) -> Group:
    """Return what ``torch.distributed`` calls for the backend ``phalanx`` (see ``phalanx._torch_hook``)."""
    # Torch tells its groups apart by prefixes of the store, which are lost where the store is one of ours.
    store = wrap_c10d_store(common.store).namespace(f"torch/{common.group_id}")
    spec = GroupSpec(
        store=store,
        rank=common.group_rank,
        size=common.group_size,
        timeout=common.timeout.total_seconds(),
        job="c10d",
        generation=0,
    )
    return Group.for_torch(spec, common.store, common.global_ranks_in_group)
