"""Layers: normalisation, embedding, convolution, attention, losses.

Owns their rules. Most may be sharded along batch dims only; an embedding also along its rows (each rank looks up the
rows it has, the rest is zero) and columns; attention along batch and heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import assert_async
from phalanx.tensor.layout._placement import MASK_PARTIAL, PARTIAL_SUM, REPLICATE, Placement, Shard
from phalanx.tensor.ops._rule import Call, Choice, In, LocalRun, Rule, Sharding, all_replicated, none_empty
from phalanx.tensor.ops.rules._shape import with_strided
from phalanx.tensor.redistribute._traced import is_traced


def batch_dims(first: int, count: Callable[[Call], int], num_outputs: int = 1) -> Callable[[Call], Sharding | None]:
    """Make a rule: the leading ``count`` dims of input ``first`` and of every output may be sharded, and the other
    inputs are replicated.
    """

    def rule(call: Call) -> Sharding | None:
        choices = []
        for d in range(count(call)):
            inputs: list[Placement] = [REPLICATE] * len(call.inputs)
            inputs[first] = Shard(d)
            choices.append(Choice(tuple(inputs), (Shard(d),) * num_outputs))
        ordered = with_strided(call, _existing_first(call, first, choices))
        return Sharding([*ordered, all_replicated(call, num_outputs)])

    return rule


def _existing_first(call: Call, index: int, choices: list[Choice]) -> list[Choice]:
    have = call.inputs[index].spec.placements
    return sorted(choices, key=lambda c: c.inputs[index] not in have)


def _before_normalized(call: Call) -> int:
    return max(0, call.inputs[0].ndim - len(tuple(call.arg(1, "normalized_shape"))))


layer_norm = batch_dims(0, _before_normalized)


def batch_norm(call: Call) -> Sharding | None:
    """Channels may be sharded; in evaluation every dim. Running statistics are written in place, so they never move."""
    first, *channels = call.inputs
    training = bool(call.arg(5, "training", True))
    if call.args[0] is not first or first.ndim < 2 or any(one.ndim != 1 for one in channels):
        return None
    whole = (REPLICATE,) * len(channels)
    choices = [Choice((Shard(1), *(Shard(0),) * len(channels)), (Shard(1),))]
    if not training:
        choices += [Choice((Shard(d), *whole), (Shard(d),)) for d in range(first.ndim) if d != 1]
    written = [one for one in call.args[3:5] if isinstance(one, In)] if training else []

    def valid(placements: Any) -> bool:
        return none_empty(call, placements) and all(
            tuple(placements[one.index]) == one.spec.placements for one in written
        )

    return Sharding([*_existing_first(call, 0, choices), all_replicated(call, 1)], valid=valid)


def native_batch_norm(call: Call) -> Sharding | None:
    """Follow ``batch_norm``, which is made of it: in training it also returns mean and deviation of each channel."""
    if not isinstance(call.arg(3, "running_mean"), In) or not call.arg(5, "training"):
        return None
    sharding = batch_norm(call)
    if sharding is not None:
        channels = [Shard(0) if c.outputs[0].is_shard(1) else REPLICATE for c in sharding.choices]
        sharding.choices = [
            Choice(c.inputs, (*c.outputs, own, own)) for c, own in zip(sharding.choices, channels, strict=True)
        ]
    return sharding


def group_norm(call: Call) -> Sharding | None:
    return batch_dims(0, lambda c: 1)(call)


def embedding(call: Call) -> Sharding | None:
    """``torch.embedding(weight, indices, padding_idx, ...)``."""
    if len(call.inputs) != 2 or call.arg(4, "sparse", False) or call.arg(3, "scale_grad_by_freq", False):
        return None
    indices = call.inputs[1]
    padding = call.arg(2, "padding_idx", -1)
    choices = [Choice((REPLICATE, Shard(d)), (Shard(d),)) for d in range(indices.ndim)]
    choices.append(Choice((Shard(1), REPLICATE), (Shard(indices.ndim),)))
    choices.append(Choice((Shard(0), REPLICATE), (MASK_PARTIAL,)))
    choices.append(all_replicated(call, 1))

    def bind(run: LocalRun) -> Callable[..., Any]:
        spec = run.inputs[0]
        if spec.local_shape[0] == spec.shape[0]:
            empty = 0 in run.outputs[0].local_shape
            return _nothing_found if empty else run.func
        offset, total = spec.local_offset(0), spec.shape[0]
        return lambda weight, indices, *rest, **options: masked_lookup(weight, indices, offset, padding, total)

    return Sharding(choices, bind=bind)


def _nothing_found(weight: Tensor, indices: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Look up an embedding that has no elements: torch's cannot be differentiated twice then."""
    return weight.index_select(0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[1])


def embedding_bag(call: Call) -> Sharding | None:
    """``torch.embedding_bag(weight, indices, offsets, scale_grad, mode, ...)``, sums and means: columns may be sharded.

    Its other results (which bag, how large) are the same on every rank.
    """
    if call.args[0] is not call.inputs[0] or call.arg(4, "mode", 0) == 2 or call.arg(5, "sparse", False):
        return None
    others = (REPLICATE,) * (len(call.inputs) - 1)
    columns = Choice((Shard(1), *others), (Shard(1), REPLICATE, REPLICATE, REPLICATE))
    return Sharding([columns, all_replicated(call, 4)])


def masked_lookup(rows: Tensor, indices: Tensor, offset: int, padding: int, total: int) -> Tensor:
    """Look up those indices whose row is here; zero for the others."""
    wrong = ((indices < 0) | (indices >= total)).any()
    if is_traced(indices):
        assert_async(~wrong, f"index out of range in self (embedding of {total} rows)")
    elif bool(wrong):
        raise IndexError(f"index out of range in self (embedding of {total} rows)")
    own = indices - offset
    missing = (own < 0) | (own >= rows.shape[0])
    if rows.shape[0] == 0:
        return rows.new_zeros((*indices.shape, rows.shape[1])) + rows.sum()  # keeps the graph
    if not rows.shape[1]:
        return _nothing_found(rows, own.masked_fill(missing, 0))
    local_padding = padding - offset if 0 <= padding - offset < rows.shape[0] else -1
    found = torch.embedding(rows, own.masked_fill(missing, 0), local_padding)
    return found.masked_fill(missing.unsqueeze(-1), 0.0)


def convolution(call: Call) -> Sharding | None:
    """conv1d/2d/3d: batch, output channels, or input channels (which are summed); groups if they stay together."""
    return _convolution(call, weight_out=0)


def transposed_convolution(call: Call) -> Sharding | None:
    """conv_transpose1d/2d/3d: the same with the first two dims of the weight exchanged."""
    return _convolution(call, weight_out=1)


def _convolution(call: Call, weight_out: int) -> Sharding | None:
    if len(call.inputs) not in (2, 3):
        return None
    groups = int(call.arg(6, "groups", 1))
    first, weight = call.inputs[:2]
    if first.ndim != weight.ndim:
        return None
    has_bias = len(call.inputs) == 3

    def with_bias(*pair: Placement, bias: Placement) -> tuple[Placement, ...]:
        return (*pair, bias) if has_bias else pair

    choices = [Choice(with_bias(Shard(0), REPLICATE, bias=REPLICATE), (Shard(0),))]
    if groups == 1:
        choices += [
            Choice(with_bias(REPLICATE, Shard(weight_out), bias=Shard(0)), (Shard(1),)),
            Choice(with_bias(Shard(1), Shard(1 - weight_out), bias=PARTIAL_SUM), (PARTIAL_SUM,)),
        ]
    else:
        choices.append(Choice(with_bias(Shard(1), Shard(0), bias=Shard(0)), (Shard(1),)))

    def valid(placements: Any) -> bool:
        parts = math.prod(
            n for p, n in zip(placements[0], call.axis_sizes, strict=True) if groups > 1 and p.is_shard(1)
        )
        return groups % parts == 0 and _no_empty_shards(call.inputs, placements)

    def local(run: LocalRun, args: Any, kwargs: Any) -> Any:
        spec = run.inputs[0]
        own = groups * spec.local_shape[1] // spec.shape[1]  # of the groups, this rank's
        if len(args) > 6:
            return run.func(*args[:6], own, *args[7:], **kwargs)
        return run.func(*args, **{**kwargs, "groups": own})

    return Sharding([*choices, all_replicated(call, 1)], valid=valid, local=local if groups > 1 else None)


def _no_empty_shards(inputs: list[In], placements: Any) -> bool:
    for one, given in zip(inputs, placements, strict=True):
        parts: dict[int, int] = {}
        for p, size in zip(given, one.spec.mesh.shape, strict=True):
            if isinstance(p, Shard):
                parts[p.dim] = parts.get(p.dim, 1) * size
        for dim, count in parts.items():
            if one.shape[dim] % count:
                return False
    return True


def pooling(linear: bool) -> Rule:
    """Make the rule of pooling, which leaves batch and channel dims alone; averages are linear."""

    def rule(call: Call) -> Sharding | None:
        one = call.inputs[0]
        if len(call.inputs) != 1:
            return None
        told = re.search(r"([123])d", call.name)
        assert told is not None, f"{call.name} does not tell its number of dims"
        return _planes(call, one.ndim - int(told[1]), len(call.output_shapes()), linear)

    return rule


def _planes(call: Call, count: int, num_outputs: int, linear: bool) -> Sharding:
    """Lay out functions of planes: the first ``count`` dims may be sharded."""
    one = call.inputs[0]
    choices = [Choice((Shard(d),), (Shard(d),) * num_outputs) for d in range(count)]
    choices = _existing_first(call, 0, choices)
    if linear:
        choices += [Choice((p,), (p,)) for p in one.spec.placements if p.is_partial("sum") or p.is_partial("avg")]
    return Sharding([*choices, all_replicated(call, num_outputs)], valid=lambda p: none_empty(call, p))


def resizing(call: Call) -> Sharding | None:
    """``upsample_*(x, size, ...)``: the size is given, so meta tensors, which take long for some, are not asked."""
    one, size = call.inputs[0], call.arg(1, "output_size")
    if len(call.inputs) != 1 or size is None or one.ndim != len(size) + 2:
        return None
    sharding = _planes(call, 2, 1, linear=True)
    sharding.shapes = [torch.Size([*one.shape[:2], *size])]
    sharding.local = _resize
    return sharding


def _resize(run: LocalRun, args: Any, kwargs: Any) -> Any:
    made = run.func(*args, **kwargs)
    assert tuple(made.shape) == run.outputs[0].local_shape, f"{made.shape} is not as promised: {run.outputs[0]!r}"
    return made


def attention(call: Call) -> Sharding | None:
    """``scaled_dot_product_attention(query, key, value, mask, dropout, ...)``: batch and heads."""
    query, key, value = call.inputs[:3]
    if query.ndim != 4 or key.ndim != 4 or call.arg(4, "dropout_p", 0.0) or call.kwargs.get("enable_gqa"):
        return None
    if query.shape[:2] != key.shape[:2] or query.shape[:2] != value.shape[:2] or len(call.inputs) > 4:
        return None
    mask = call.inputs[3] if len(call.inputs) == 4 else None
    choices = []
    for d in (0, 1):
        inputs: list[Placement] = [Shard(d)] * 3
        if mask is not None:
            own = d - (4 - mask.ndim)
            inputs.append(Shard(own) if own >= 0 and mask.shape[own] > 1 else REPLICATE)
        choices.append(Choice(tuple(inputs), (Shard(d),)))
    return Sharding([*with_strided(call, _existing_first(call, 0, choices)), all_replicated(call, 1)])


def cross_entropy(call: Call) -> Sharding | None:
    """Batch dims may be sharded for reductions ``none`` (0) and ``sum`` (2); ``_composite.py`` makes the mean from two
    sums.
    """
    first, target = call.inputs[:2]
    reduction = call.arg(3, "reduction", 1)
    if first.ndim < 2 or len(call.inputs) > 3 or reduction == 1:
        return None
    same = target.ndim == first.ndim
    rest: tuple[Placement, ...] = (REPLICATE,) * (len(call.inputs) - 2)
    choices = []
    for d in range(first.ndim):
        if d == 1:
            continue
        onto = d if same or d == 0 else d - 1
        out: Placement = PARTIAL_SUM if reduction == 2 else Shard(d if d == 0 else d - 1)
        choices.append(Choice((Shard(d), Shard(onto), *rest), (out,)))
    return Sharding([*with_strided(call, _existing_first(call, 0, choices)), all_replicated(call, 1)])
