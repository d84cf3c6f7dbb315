"""Reshards from any layout to any other by overlap boxes and one exchange; differentiable.

Owns the plan for one tensor and the autograd function. The gradient of a move is the move back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._exchange import Copy, RankBox, TensorMove, exchange, pieces_of, plan_copies
from phalanx.shard.exchange._shard import Shard
from phalanx.shard.layout._metadata import ShardedTensorMetadata, ShardMetadata


class ReshardPlan(NamedTuple):
    """Who holds what before and after, and the copies between."""

    sources: list[RankBox]
    targets: list[RankBox]
    copies: list[Copy]

    def reversed(self) -> ReshardPlan:
        back = [Copy(copy.target, copy.source, copy.box) for copy in self.copies]
        return ReshardPlan(self.targets, self.sources, back)

    def run(self, group: Group, given: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> None:
        """``given`` and ``wanted``: this rank's tensors, in the order of its pieces."""
        move = TensorMove(
            dtype,
            self.sources,
            self.targets,
            self.copies,
            _by_position(self.sources, given, group.rank),
            _by_position(self.targets, wanted, group.rank),
        )
        exchange(group, [move])


def _by_position(pieces: Sequence[RankBox], tensors: Sequence[Tensor], rank: int) -> dict[int, Tensor]:
    mine = [position for position, piece in enumerate(pieces) if piece.rank == rank]
    return dict(zip(mine, tensors, strict=True))


def plan_reshard(before: Sequence[ShardMetadata], after: Sequence[ShardMetadata], group: Group) -> ReshardPlan:
    sources, targets = pieces_of(before, group), pieces_of(after, group)
    return ReshardPlan(sources, targets, plan_copies(sources, targets))


def reshard_shards(
    shards: Sequence[Shard],
    before: ShardedTensorMetadata,
    after: ShardedTensorMetadata,
    group: Group,
    *,
    connect_leaves: bool = False,
) -> list[Shard]:
    """Return this rank's shards under ``after``. What came from a computation stays connected to it; leaves become
    leaves.

    With ``connect_leaves`` the results are connected to leaves too.
    """
    plan = plan_reshard(before.shards_metadata, after.shards_metadata, group)
    mine = [
        metadata
        for metadata, piece in zip(after.shards_metadata, plan.targets, strict=True)
        if piece.rank == group.rank
    ]
    tensors = [shard.tensor for shard in shards]
    properties = before.tensor_properties
    leaves = not connect_leaves and all(tensor.is_leaf for tensor in tensors)
    if properties.requires_grad and not leaves and torch.is_grad_enabled():
        _check_busy(group, "after", plan.targets)
        if not connect_leaves:
            _check_busy(group, "before", plan.sources)  # it cannot tell whether the others' tensors are leaves
        # A rank without shards must take part in backward as well: this input makes its results part of the graph.
        anchor = torch.empty(0, requires_grad=True)
        applied = _Reshard.apply(plan, group, mine, properties.dtype, anchor, *tensors)  # type: ignore[no-untyped-call]  # torch's
        results = list(applied)
    else:
        results = [_empty(metadata, properties.dtype) for metadata in mine]
        plan.run(group, tensors, results, properties.dtype)
        for result in results:
            result.requires_grad_(properties.requires_grad)
    return [Shard(tensor, metadata) for tensor, metadata in zip(results, mine, strict=True)]


def _empty(metadata: ShardMetadata, dtype: torch.dtype) -> Tensor:
    assert metadata.placement is not None, "the plan has asked for its rank"
    return torch.empty(metadata.shard_sizes, dtype=dtype, device=metadata.placement.device())


def _check_busy(group: Group, when: str, pieces: Sequence[RankBox]) -> None:
    idle = set(range(group.size)) - {piece.rank for piece in pieces}
    if idle:
        raise ValueError(
            f"rank {group.rank}: resharding a tensor that is part of a computation needs a shard on every rank, or "
            f"backward would hang; ranks {sorted(idle)} of the group hold none {when} it. "
            f"detach() first, or change the spec"
        )


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: ReshardPlan,
        group: Group,
        mine: list[ShardMetadata],
        dtype: torch.dtype,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group = plan, group
        ctx.shapes = [(tensor.shape, tensor.device) for tensor in tensors]
        results = [_empty(metadata, dtype) for metadata in mine]
        plan.run(group, tensors, results, dtype)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dtype = grads[0].dtype
        results = [torch.zeros(shape, dtype=dtype, device=device) for shape, device in ctx.shapes]
        ctx.plan.reversed().run(ctx.group, [grad.contiguous() for grad in grads], results, dtype)
        return (None, None, None, None, None, *results)
