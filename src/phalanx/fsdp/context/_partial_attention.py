"""Attention of some queries on some keys, and how such parts become the whole: the math, without communication.

Owns ``attend`` and ``attend_backward`` (one block, by torch's fused CPU kernel where it fits, else by ``naive_attend``
and ``naive_attend_backward``, which say what is meant), and ``merge``. Queries are (batch, heads, rows, width), keys
and values (batch, key heads, columns, width); query heads that are a multiple of the key heads share them.

A part is a pair: the softmax-weighted mean of the values seen, and the log-sum-exp of the scores seen, which is all
that another part needs to know of it. Backward of a block needs of the whole only the output and the log-sum-exp, since
each probability is exp(score - lse).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx._torch_private import flash_attention_for_cpu, flash_attention_for_cpu_backward


class PartialAttention(NamedTuple):
    """The attention of rows of queries on some of the keys."""

    out: Tensor  # (batch, heads, rows, width of values)
    lse: Tensor  # (batch, heads, rows)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are added up."""
    return torch.promote_types(dtype, torch.float32)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> PartialAttention:
    """Return the attention of one block."""
    if not _fused(query, value):
        return naive_attend(query, key, value, causal=causal, scale=scale)
    return PartialAttention(*flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale))


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: PartialAttention, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one block's queries, keys and values; ``whole`` is the attention on all keys."""
    if not _fused(query, value):
        return naive_attend_backward(grad, query, key, value, whole, causal=causal, scale=scale)
    out, lse = whole.out.contiguous(), whole.lse.contiguous()
    result = flash_attention_for_cpu_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
    return result[0], result[1], result[2]


def _fused(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can be used: it is for the CPU, and for values as wide as queries."""
    return is_host(query) and query.shape[-1] == value.shape[-1]


def merge(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Return the attention on the keys of both parts, which are of the same rows and share no key.

    A part that saw no key has a log-sum-exp of minus infinity and counts for nothing.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    seen = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    weights = [torch.exp(part.lse - seen).unsqueeze(-1) for part in (first, second)]
    return PartialAttention(first.out * weights[0] + second.out * weights[1], lse)


# ---- what is meant


def naive_attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> PartialAttention:
    """``attend``, with all scores in memory."""
    scores, values = _scores(query, key, causal, scale), _shared(value, query)
    lse = torch.logsumexp(scores, -1)
    return PartialAttention((_probabilities(scores, lse) @ values).to(query.dtype), lse)


def naive_attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: PartialAttention, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward``, with all scores in memory."""
    exact = exact_dtype(query.dtype)
    grad, out = grad.to(exact), whole.out.to(exact)
    probabilities = _probabilities(_scores(query, key, causal, scale), whole.lse)
    d_value = probabilities.transpose(-1, -2) @ grad
    d_probabilities = grad @ _shared(value, query).transpose(-1, -2)
    d_scores = probabilities * (d_probabilities - (grad * out).sum(-1, keepdim=True)) * scale
    d_query, d_key = d_scores @ _shared(key, query), d_scores.transpose(-1, -2) @ query.to(exact)
    groups = (key.shape[0], key.shape[1], query.shape[1] // key.shape[1])
    d_key, d_value = (d.view(*groups, *d.shape[2:]).sum(2) for d in (d_key, d_value))
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = query.to(exact_dtype(query.dtype)) @ _shared(key, query).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse).unsqueeze(-1))


def _shared(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    return tensor.to(exact_dtype(query.dtype)).repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)
