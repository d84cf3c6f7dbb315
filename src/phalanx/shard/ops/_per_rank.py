"""Runs operations in which each rank's plain tensors are its own, on the full sharded tensors, on every rank.

Phases: (1) one ``all_gather`` per sharded argument makes it full on every rank; (2) the operation itself runs on plain
tensors, so every option means what it means in torch; (3) backward is one ``reduce_scatter``: the owners of the shards
get the sum of all ranks' gradients. Every rank has to take part, in backward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.shard.exchange._exchange import RankBox, pieces_of
from phalanx.shard.layout._boxes import view_of
from phalanx.shard.ops._convert import convert_sharded
from phalanx.shard.ops._shard_by_shard import is_in_place
from phalanx.shard.tensor._tensor import ShardedTensor


def run_per_rank(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the plain result of this rank's own plain tensors and the full sharded ones."""
    name = getattr(func, "__name__", str(func))
    if is_in_place(func) or kwargs.get("out") is not None:
        raise NotImplementedError(
            f"{name} in place on a ShardedTensor with a plain tensor that is each rank's own: the ranks would "
            f'write different values; leave plain_inputs("per_rank") for it'
        )
    args, kwargs = convert_sharded(whole_on_every_rank, args, kwargs)
    return func(*args, **kwargs)


def whole_on_every_rank(tensor: ShardedTensor) -> Tensor:
    """Return the full tensor as a plain one; gradients of all ranks are summed into the shards. Collective."""
    group, metadata = tensor._process_group, tensor.metadata()
    layout = _Layout(group, pieces_of(metadata.shards_metadata, group), metadata.size, tensor.device)
    locals_ = [shard.tensor for shard in tensor.local_shards()]
    if tensor.requires_grad and torch.is_grad_enabled():
        # A rank without shards must take part in backward as well: this input makes its result part of the graph.
        anchor = torch.empty(0, requires_grad=True)
        result: Tensor = _GlobalResult.apply(layout, tensor.dtype, anchor, *locals_)  # type: ignore[no-untyped-call]  # torch's
        return result
    return layout.gather(locals_, tensor.dtype)


class _Layout(NamedTuple):
    """Who holds what of a tensor of ``size``."""

    group: Group
    pieces: list[RankBox]
    size: torch.Size
    device: torch.device

    def views(self, full: Tensor, rank: int) -> list[Tensor]:
        """Return the views of the full tensor that are the shards of ``rank``."""
        origin = (0,) * len(self.size)
        return [view_of(full, piece.box, origin) for piece in self.pieces if piece.rank == rank]

    def gather(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        full = torch.empty(self.size, dtype=dtype, device=self.device)
        views_of = [self.views(full, rank) for rank in range(self.group.size)]
        received = [full.new_empty(sum(view.numel() for view in views)) for views in views_of]
        self.group.all_gather(received, _flat([tensor.detach() for tensor in tensors], full))
        for buffer, views in zip(received, views_of, strict=True):
            for view, values in zip(views, buffer.split([view.numel() for view in views]), strict=True):
                view.copy_(values.view(view.shape))
        return full

    def scatter(self, grad: Tensor) -> list[Tensor]:
        sent = [_flat(self.views(grad, rank), grad) for rank in range(self.group.size)]
        mine = self.views(grad, self.group.rank)
        received = torch.empty_like(sent[self.group.rank])
        self.group.reduce_scatter(received, sent, "sum")
        flats = received.split([view.numel() for view in mine])
        return [flat.view(view.shape) for flat, view in zip(flats, mine, strict=True)]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


class _GlobalResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: _Layout, dtype: torch.dtype, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        return layout.gather(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, None, *ctx.layout.scatter(grads[0]))
