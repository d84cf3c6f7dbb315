"""Gathers a state dict on one rank: sharded entries in few collectives, the others as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.shard.exchange._gather import GatheredTensor, gather_tensors
from phalanx.shard.exchange._groups import as_group
from phalanx.shard.tensor._tensor import ShardedTensor


def gather_state_dict(
    state: Mapping[str, Any], dst: int = 0, *, process_group: Any = None, max_bytes: int | None = None
) -> dict[str, Any] | None:
    """Gather all entries as full tensors on rank ``dst`` of the group, None elsewhere; sharded ones in few collectives.

    >>> full = gather_state_dict(model.state_dict())        # doctest: +SKIP
    """
    sharded = {name: value for name, value in state.items() if isinstance(value, ShardedTensor)}
    group = as_group(process_group) if process_group or not sharded else next(iter(sharded.values()))._process_group
    gathered = {
        name: GatheredTensor(value.metadata(), value.local_shards(), _empty_full(value) if group.rank == dst else None)
        for name, value in sharded.items()
    }
    gather_tensors(group, list(gathered.values()), dst, max_bytes)
    if group.rank != dst:
        return None
    return {name: gathered[name].out if name in gathered else value for name, value in state.items()}


def _empty_full(tensor: ShardedTensor) -> Tensor:
    """Room for the gathered tensor on the host or device that this rank's shards are on."""
    return torch.empty(tuple(tensor._metadata.size), dtype=tensor.dtype, device=tensor.device)
