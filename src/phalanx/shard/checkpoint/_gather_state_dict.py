"""Gathers a whole state dict on one rank: sharded tensors and DTensors together, in few collectives.

The other ranks never hold more than their own shards and a round's share of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._gather import GatheredTensor, gather_tensors
from phalanx.shard.exchange._groups import as_group
from phalanx.shard.ops._convert import from_dtensor
from phalanx.shard.tensor._tensor import ShardedTensor
from phalanx.tensor import DTensor


def gather_state_dict(
    state: Mapping[str, Any], dst: int = 0, *, process_group: Any = None, max_bytes: int | None = None
) -> dict[str, Any] | None:
    """Gather all entries as full tensors on rank ``dst`` of the group, None elsewhere; sharded ones in few collectives.

    >>> full = gather_state_dict(model.state_dict())        # doctest: +SKIP
    """
    sharded, group = sharded_entries(state, process_group)
    gathered = {
        name: GatheredTensor(value.metadata(), value.local_shards(), _empty_full(value) if group.rank == dst else None)
        for name, value in sharded.items()
    }
    gather_tensors(group, list(gathered.values()), dst, max_bytes)
    if group.rank != dst:
        return None
    return {name: gathered[name].out if name in gathered else value for name, value in state.items()}


def sharded_entries(state: Mapping[str, Any], process_group: Any) -> tuple[dict[str, ShardedTensor], Group]:
    """Return the entries that are spread over ranks, as sharded tensors without a graph, and the group to gather in.

    That is the given one, or the one that the entries are on, or the current one if none is spread. A group in which
    some of the entries' ranks are missing is an error.
    """
    found: dict[str, ShardedTensor] = {}
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            found[name] = value
        elif isinstance(value, DTensor):
            with torch.no_grad():
                found[name] = from_dtensor(value)
    if process_group is not None or not found:
        group = as_group(process_group)
    else:
        group = max((value._process_group for value in found.values()), key=lambda each: each.size)
    for name, value in found.items():
        missing = sorted(set(value._process_group.ranks) - set(group.ranks))
        if missing:
            raise ValueError(
                f"rank {group.rank}: {name!r} is also on ranks {missing}, which are not in the group of {group.ranks}; "
                f"pass a process_group with all of them"
            )
    return found, group


def _empty_full(tensor: ShardedTensor) -> Tensor:
    """Room for the gathered tensor on the host or device that this rank's shards are on."""
    return torch.empty(tuple(tensor._metadata.size), dtype=tensor.dtype, device=tensor.device)
