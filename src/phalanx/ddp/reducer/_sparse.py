"""Reduces sparse gradients: rows travel, not full tables.

Ranks have different rows, so values are gathered with their indices and added up; the result is one coalesced sparse
gradient that is equal on all ranks (rows are summed in rank order everywhere). If the rows of a step are known
beforehand on all ranks (``set_metadata``), only their values travel, as one dense all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx.comm.group._sparse_sum import sparse_sum

if TYPE_CHECKING:
    from phalanx.comm import Group


class SparseReduction:
    """Sums sparse gradients over a group. Holds the row metadata that users give by parameter name."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def set_metadata(self, rows_by_name: dict[str, Tensor]) -> None:
        """Rows (along dimension 0) that any rank touches in the coming steps, equal on all ranks."""
        self._rows = {name: torch.unique(torch.as_tensor(rows).reshape(-1)) for name, rows in rows_by_name.items()}

    def reduce(self, group: Group, name: str, param: nn.Parameter, grad: Tensor | None) -> Tensor:
        """Return the sum over all ranks, coalesced. ``None`` contributes nothing."""
        grad = _as_sparse(grad, param)
        rows = self._rows.get(name)
        return sparse_sum(group, grad) if rows is None else _known_rows_sum(group, name, grad, rows)


def _as_sparse(grad: Tensor | None, param: nn.Parameter) -> Tensor:
    if grad is None:
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=param.device),
            param.new_empty((0, *param.shape[1:])),
            param.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    return grad.coalesce() if grad.is_sparse else grad.to_sparse(1).coalesce()


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows.reshape(1, -1), values, shape, check_invariants=False).coalesce()


def _known_rows_sum(group: Group, name: str, grad: Tensor, rows: Tensor) -> Tensor:
    own = grad.indices().reshape(-1)
    place = torch.searchsorted(rows, own)
    if own.numel() and (int(place.max()) >= rows.numel() or not torch.equal(rows[place], own)):
        raise ValueError(
            f"rank {group.rank}: the sparse gradient of {name!r} has rows that its metadata does not list, e.g. "
            f"{sorted(set(own.tolist()) - set(rows.tolist()))[:5]}; give all rows that any rank touches"
        )
    values = grad.values().new_zeros((rows.numel(), *grad.values().shape[1:]))
    values[place] = grad.values()
    group.all_reduce(values)
    return _sparse(rows, values, grad.shape)
