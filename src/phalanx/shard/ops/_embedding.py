"""Looks up rows of a sharded table: each rank asks for its own batch's rows and gets them as a plain tensor.

Phases: (1) each rank reduces its indices to the distinct ones and all ranks hear all lists; (2) the owners send exactly
the parts of rows that were asked for, in one exchange, whatever the layout of the table; (3) the lookup itself runs on
the fetched rows, so every option means what it means in torch. Backward sends the rows' gradients the same way back.

Every rank has to take part, in backward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.comm import Group
from phalanx.shard.exchange._exchange import Copy, RankBox, TensorMove, exchange, pieces_of
from phalanx.shard.layout._boxes import Box
from phalanx.shard.tensor._tensor import ShardedTensor


def embedding(
    input: Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``torch.nn.functional.embedding`` of this rank's indices."""
    rows, positions, distinct = _fetch("embedding", input, weight, sparse, max_norm, norm_type)
    padding = _position(padding_idx, distinct, weight)
    return functional.embedding(positions, rows, padding, scale_grad_by_freq=scale_grad_by_freq)


def embedding_bag(
    input: Tensor,
    weight: ShardedTensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``torch.nn.functional.embedding_bag`` of this rank's indices."""
    rows, positions, distinct = _fetch("embedding_bag", input, weight, sparse, max_norm, norm_type)
    return functional.embedding_bag(
        positions,
        rows,
        None if offsets is None else offsets.to(positions.dtype),
        scale_grad_by_freq=scale_grad_by_freq,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=_position(padding_idx, distinct, weight),
    )


def _position(padding_idx: int | None, distinct: Tensor, weight: ShardedTensor) -> int | None:
    if padding_idx is None:
        return None
    row = padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx
    found = (distinct == row).nonzero()
    return int(found[0]) if len(found) else None


def _fetch(
    name: str, indices: Tensor, weight: Any, sparse: bool, max_norm: float | None, norm_type: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows, each index's position among them, and which rows they are."""
    if not isinstance(weight, ShardedTensor) or isinstance(indices, ShardedTensor):
        raise TypeError(f"{name}: the indices must be a plain tensor (this rank's own) and the weight a ShardedTensor")
    if weight.dim() != 2:
        raise ValueError(f"{name}: the weight must have 2 dims, it has size {tuple(weight.shape)}")
    if sparse:
        raise NotImplementedError(f"{name}(sparse=True): gradients of a sharded table are dense per shard")
    distinct, positions = torch.unique(indices, return_inverse=True)
    wanted = _all_lists(weight._process_group, distinct.to(torch.int64).cpu())
    _check_bounds(name, wanted, weight.shape[0])
    if max_norm is not None:
        _limit_norms(weight, torch.unique(torch.cat(wanted)), max_norm, norm_type)
    lookup = _Lookup.plan(weight, wanted)
    tensors = [shard.tensor for shard in weight.local_shards()]
    if weight.requires_grad and torch.is_grad_enabled():
        # A rank without shards must take part in backward as well: this input makes its rows part of the graph.
        anchor = torch.empty(0, requires_grad=True)
        rows = _Fetch.apply(lookup, anchor, *tensors)  # type: ignore[no-untyped-call]  # torch's is untyped
    else:
        rows = lookup.forward(tensors)
    return rows, positions.reshape(indices.shape), distinct


def _all_lists(group: Group, distinct: Tensor) -> list[Tensor]:
    lengths = torch.empty(group.size, dtype=torch.int64)
    group.all_gather_into_tensor(lengths, torch.tensor([distinct.numel()]))
    lists = [torch.empty(int(length), dtype=torch.int64) for length in lengths.tolist()]
    group.all_gather(lists, distinct)
    return lists


def _check_bounds(name: str, wanted: Sequence[Tensor], num_rows: int) -> None:
    """Every rank sees every list, so all raise together."""
    for rank, rows in enumerate(wanted):
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= num_rows):
            bad = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            raise IndexError(
                f"{name}: index out of range: rank {rank} asks for row {bad} of a table of {num_rows} rows"
            )


@dataclass(frozen=True)
class _Lookup:
    """Who sends which rows to whom. ``picks[i]`` are the rows of this rank's shard that source ``i`` consists of."""

    group: Group
    sources: list[RankBox]
    targets: list[RankBox]
    copies: list[Copy]
    picks: dict[int, tuple[int, Tensor]]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def plan(cls, weight: ShardedTensor, wanted: Sequence[Tensor]) -> _Lookup:
        group, width = weight._process_group, weight.shape[1]
        targets = [RankBox(rank, Box((0, 0), (len(rows), width))) for rank, rows in enumerate(wanted)]
        sources: list[RankBox] = []
        copies: list[Copy] = []
        picks: dict[int, tuple[int, Tensor]] = {}
        num_mine = 0
        for owner, box in pieces_of(weight.metadata().shards_metadata, group):
            (row, column), (height, wide) = box.offsets, box.sizes
            for asker, rows in enumerate(wanted):
                low, high = torch.searchsorted(rows, torch.tensor([row, row + height])).tolist()
                if low == high or not wide:
                    continue
                box = Box((low, column), (high - low, wide))
                if owner == group.rank:
                    picks[len(sources)] = (num_mine, rows[low:high] - row)
                copies.append(Copy(len(sources), asker, box))
                sources.append(RankBox(owner, box))
            num_mine += owner == group.rank
        return cls(group, sources, targets, copies, picks, weight.dtype, weight.device)

    def forward(self, shards: Sequence[Tensor]) -> Tensor:
        picked = {i: shards[k].detach().index_select(0, rows) for i, (k, rows) in self.picks.items()}
        result = torch.empty(self.targets[self.group.rank].box.sizes, dtype=self.dtype, device=self.device)
        move = TensorMove(self.dtype, self.sources, self.targets, self.copies, picked, {self.group.rank: result})
        exchange(self.group, [move])
        return result

    def backward(self, grad: Tensor, shards: Sequence[tuple[torch.Size, torch.device]]) -> list[Tensor]:
        arrived = {i: torch.empty(self.sources[i].box.sizes, dtype=grad.dtype, device=self.device) for i in self.picks}
        back = [Copy(copy.target, copy.source, copy.box) for copy in self.copies]
        move = TensorMove(grad.dtype, self.targets, self.sources, back, {self.group.rank: grad}, arrived)
        exchange(self.group, [move])
        grads = [torch.zeros(shape, dtype=grad.dtype, device=device) for shape, device in shards]
        for i, (k, rows) in self.picks.items():
            grads[k].index_add_(0, rows, arrived[i])
        return grads


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: _Lookup, anchor: Tensor, *shards: Tensor) -> Tensor:
        ctx.lookup = lookup
        ctx.shards = [(shard.shape, shard.device) for shard in shards]
        return lookup.forward(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, *ctx.lookup.backward(grads[0].contiguous(), ctx.shards))


def _limit_norms(weight: ShardedTensor, rows: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows that will be looked up and are longer than ``max_norm``, in place, as torch does."""
    infinite = norm_type == float("inf")
    norms = torch.zeros(len(rows), dtype=torch.float64)
    mine = []
    for shard in weight.local_shards():
        first = shard.metadata.shard_offsets[0]
        low, high = torch.searchsorted(rows, torch.tensor([first, first + shard.metadata.shard_sizes[0]])).tolist()
        picked = rows[low:high] - first
        mine.append((shard.tensor, picked, slice(low, high)))
        if picked.numel() and shard.tensor.shape[1]:
            values = shard.tensor.detach()[picked].double().abs()
            if infinite:
                norms[low:high] = torch.maximum(norms[low:high], values.amax(1))
            else:
                norms[low:high] += values.pow(norm_type).sum(1)
    weight._process_group.all_reduce(norms, "max" if infinite else "sum")
    lengths = norms if infinite else norms.pow(1 / norm_type)
    scales = torch.where(lengths > max_norm, max_norm / (lengths + 1e-7), 1.0)
    with torch.no_grad():
        for tensor, picked, positions in mine:
            tensor[picked] *= scales[positions].to(tensor.dtype)[:, None]
