"""Adds up sparse tensors over a group: entries travel with their indices, not whole tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group


def sparse_sum(group: Group, tensor: Tensor) -> Tensor:
    """Return the coalesced sum over all ranks, equal on all of them: entries are added in the order of the ranks."""
    tensor = tensor.coalesce()
    indices, values = tensor.indices().contiguous(), tensor.values().contiguous()
    num_entries = indices.new_tensor([values.shape[0]])
    counts = [torch.zeros_like(num_entries) for _ in range(group.size)]
    group.all_gather(counts, num_entries)
    sizes = [int(count) for count in counts]
    all_indices = [indices.new_empty((size, indices.shape[0])) for size in sizes]  # entries first: they differ
    all_values = [values.new_empty((size, *values.shape[1:])) for size in sizes]
    group.all_gather(all_indices, indices.t().contiguous())
    group.all_gather(all_values, values)
    return torch.sparse_coo_tensor(
        torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape, check_invariants=False
    ).coalesce()
