"""Attention of this rank's queries on the keys and values of all ranks, forward and backward.

Owns ``Attention``, what one call computes, and ``sequence_attention``, which computes it. Forward, in order: (1) keys
and values are packed into one flat block; (2) for each rank's block, this rank's first: the part of the attention that
its keys give (nothing, where a causal mask hides them all), merged into what there is; meanwhile the next block
travels. Backward the same way: gradients of queries add up here, those of keys and values at the rank that holds them.

What is kept for backward is local: queries, keys, values, output and log-sum-exp of this rank's positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.fsdp.context._block_exchange import EXCHANGES, BlockExchange
from phalanx.fsdp.context._partial_attention import PartialAttention, attend, attend_backward, exact_dtype, merge
from phalanx.fsdp.context._sequence_layout import BlockWork, SequenceLayout, work_of


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention over a group of ranks that hold a sequence."""

    group: Group
    layout: SequenceLayout
    method: str
    causal: bool
    scale: float

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, BlockWork | None, Tensor, Tensor]]:
        """Yield for every rank: the rank, what this one computes with its keys, its keys, its values."""
        for source, block in self.exchange(key, value).blocks(pack(key, value)):
            own = source == self.group.rank
            there = (key, value) if own else self.unpack(block, key, value, self.layout.size(source))
            yield source, work_of(self.layout, self.group.rank, source, causal=self.causal), *there

    def exchange(self, key: Tensor, value: Tensor) -> BlockExchange:
        per_position = (key.numel() + value.numel()) // key.shape[-2]
        sizes = [per_position * self.layout.size(rank) for rank in range(self.group.size)]
        return EXCHANGES[self.method](self.group, sizes)

    @staticmethod
    def unpack(block: Tensor, key: Tensor, value: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return keys and values out of a block, shaped as those of this rank but for the number of positions."""
        shapes = [(*each.shape[:-2], num_positions, each.shape[-1]) for each in (key, value)]
        first = shapes[0][0] * shapes[0][1] * shapes[0][2] * shapes[0][3]
        return block[:first].view(shapes[0]), block[first:].view(shapes[1])


def pack(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as one flat tensor, so that they travel as one."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def sequence_attention(query: Tensor, key: Tensor, value: Tensor, what: Attention) -> Tensor:
    """Return this rank's rows of the attention. Tensors have four dims: batch, heads, this rank's positions, width."""
    apply: Any = _SequenceAttention.apply
    result: Tensor = apply(_readable(query), _readable(key), _readable(value), what)
    return result


def _readable(tensor: Tensor) -> Tensor:
    """Return it as the kernel reads it: transposed heads are fine, a transposed width is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _SequenceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, what: Attention) -> Tensor:
        exact = exact_dtype(query.dtype)
        whole: PartialAttention | None = None
        for _, work, there_key, there_value in what.blocks(key, value):
            if work is None:
                continue
            rows, columns, causal = work
            found = attend(
                query[:, :, rows], there_key[:, :, columns], there_value[:, :, columns], causal=causal, scale=what.scale
            )
            part = PartialAttention(found.out.to(exact), found.lse.to(exact))
            if whole is None:  # this rank's own block: all rows
                whole = PartialAttention(part.out.contiguous(), part.lse.contiguous())
                continue
            merged = merge(PartialAttention(whole.out[:, :, rows], whole.lse[:, :, rows]), part)
            whole.out[:, :, rows] = merged.out
            whole.lse[:, :, rows] = merged.lse
        assert whole is not None, "a rank's own block comes first, and its queries see it"
        out = whole.out.to(query.dtype)
        ctx.what = what
        ctx.save_for_backward(query, key, value, out, whole.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        what: Attention = ctx.what
        if torch.is_grad_enabled():  # what follows is not recorded, so a second derivative would be silently zero
            raise NotImplementedError(
                f"rank {what.group.rank}: backward with create_graph=True of attention inside context_parallel; "
                f"its second derivative is not written"
            )
        query, key, value, out, lse = ctx.saved_tensors
        exact, grad = exact_dtype(query.dtype), _readable(grad)
        d_query = torch.zeros(query.shape, dtype=exact, device=query.device)
        exchange, gradients = what.exchange(key, value), None
        for source, work, there_key, there_value in what.blocks(key, value):
            d_key, d_value = (torch.zeros(t.shape, dtype=exact, device=t.device) for t in (there_key, there_value))
            if work is not None:
                rows, columns, causal = work
                found = attend_backward(
                    grad[:, :, rows],
                    query[:, :, rows],
                    there_key[:, :, columns],
                    there_value[:, :, columns],
                    PartialAttention(out[:, :, rows], lse[:, :, rows]),
                    causal=causal,
                    scale=what.scale,
                )
                d_query[:, :, rows] += found[0]
                d_key[:, :, columns], d_value[:, :, columns] = found[1], found[2]
            if gradients is None:
                gradients = exchange.gradients(pack(d_key, d_value))
            else:
                gradients.add(source, pack(d_key, d_value))
        assert gradients is not None, "there is a block of this rank at least"
        d_key, d_value = what.unpack(gradients.total(), key, value, key.shape[-2])
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None
