"""Reductions: dims that stay stay sharded; a sharded dim that is reduced leaves a partial result.

Owns the rules for sum, mean, max, norm, argmax and their relatives. A maximum or product that is partial has no
gradient (its reduction is not linear), so where one is needed only dims that stay may be sharded. A sharded dim of a
mean is summed and divided by the global count, which is right for uneven shards too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from phalanx.tensor.layout._placement import PARTIAL_SUM, Partial, Placement, Shard, chunk_sizes
from phalanx.tensor.ops._rule import Call, Choice, LocalRun, Sharding, all_replicated
from phalanx.tensor.ops.rules._pointwise import pointwise
from phalanx.tensor.ops.rules._shape import along, with_strided


def _layout(call: Call, dims: set[int], keepdim: bool, partial: Placement | None, num_outputs: int) -> list[Choice]:
    one = call.inputs[0]
    choices: list[Choice] = []
    for d in range(one.ndim):
        shard = Shard(d)
        if d not in dims:
            onto = d if keepdim else d - sum(gone < d for gone in dims)
            choices.append(Choice((shard,), (Shard(onto),) * num_outputs))
        elif partial is not None:
            choices.append(Choice((shard,), (partial,) * num_outputs))
    choices = [*with_strided(call, choices), all_replicated(call, num_outputs)]
    return [c for c in choices if c.inputs[0] in one.spec.placements or c.inputs[0].is_replicate()] + [
        c
        for c in choices
        if c.inputs[0].is_shard() and c.outputs[0].is_shard() and c.inputs[0] not in one.spec.placements
    ]


def _reduced(call: Call) -> tuple[set[int], bool]:
    dims = call.arg(1, "dim")
    if isinstance(dims, (list, tuple)) and not dims:
        dims = None
    given = set(range(call.inputs[0].ndim)) if dims is None else along(call, 1, "dim", dims)
    return given, bool(call.arg(2, "keepdim", False))


def sum_like(call: Call) -> Sharding | None:
    """sum, nansum: linear, so a partial input stays partial."""
    if len(call.inputs) != 1:
        return None
    dims, keepdim = _reduced(call)
    choices = _layout(call, dims, keepdim, PARTIAL_SUM, 1)
    if call.name == "sum":
        choices += [
            Choice((p,), (p,))
            for p in dict.fromkeys(call.inputs[0].spec.placements)
            if isinstance(p, Partial) and p.reduce_op in ("sum", "avg") and _inexact(call)
        ]
    return Sharding(choices)


def _inexact(call: Call) -> bool:
    return call.inputs[0].dtype.is_floating_point and call.meta().dtype.is_floating_point


def mean(call: Call) -> Sharding | None:
    if len(call.inputs) != 1:
        return None
    dims, keepdim = _reduced(call)
    one = call.inputs[0]
    choices = _layout(call, dims, keepdim, PARTIAL_SUM, 1)
    choices += [
        Choice((p,), (p,))
        for p in dict.fromkeys(one.spec.placements)
        if isinstance(p, Partial) and p.reduce_op in ("sum", "avg")
    ]
    count = math.prod(one.shape[d] for d in dims)
    ordered = sorted(dims)

    def bind(run: LocalRun) -> Callable[..., Any]:
        part = math.prod(run.inputs[0].local_shape[d] for d in dims)
        if part == count:
            return run.func  # type: ignore[no-any-return]  # torch's own

        def shared(x: Any, *args: Any, **kwargs: Any) -> Any:
            dtype = kwargs.get("dtype") or x.dtype
            if part and dtype in (torch.float16, torch.bfloat16):  # a sum may be too large for them
                return run.func(x, *args, **kwargs) * (part / count)
            return x.sum(ordered, keepdim=keepdim, dtype=dtype) / count

        return shared

    return Sharding(choices, bind=bind) if count else None


def extreme(op: str) -> Callable[[Call], Sharding | None]:
    """amax, amin, all, any, prod of values: partial by ``op`` where no gradient is needed and no shard is empty."""

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1:
            return None
        one = call.inputs[0]
        dims, keepdim = _reduced(call)
        allowed = not call.needs_grad and not one.dtype.is_complex
        allowed = allowed and one.dtype is not torch.bool and all(_none_empty(call, d) for d in dims)
        if one.dtype in (torch.float16, torch.bfloat16) and op == "product":
            allowed = False
        choices = _layout(call, dims, keepdim, Partial(op) if allowed else None, 1)
        if allowed and any(p.is_partial(op) for p in one.spec.placements):
            choices.append(Choice((Partial(op),), (Partial(op),)))
        return Sharding(choices)

    return rule


def _none_empty(call: Call, dim: int) -> bool:
    parts = math.prod(call.axis_sizes)
    return chunk_sizes(call.inputs[0].shape[dim], parts)[-1] > 0


def max_or_min(call: Call) -> Sharding | None:
    """``max(x)``, ``max(x, dim)`` (values and indices), ``max(x, y)`` (pointwise)."""
    if len(call.inputs) == 2:
        return pointwise(call)
    if len(call.args) == 1 and not call.kwargs:
        return extreme(call.name)(call)
    dims, keepdim = _reduced(call)
    return Sharding(_layout(call, dims, keepdim, None, 2))


def staying_dims(num_outputs: int = 1) -> Callable[[Call], Sharding | None]:
    """Only dims that are not reduced may be sharded: argmax, median, mode, std, logsumexp..."""

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1 or not call.inputs[0].ndim:
            return None
        dims, keepdim = _reduced(call)
        count = num_outputs if num_outputs == 1 or "dim" in call.kwargs or len(call.args) > 1 else 1
        if len(call.output_shapes()) != count:
            return None
        return Sharding(_layout(call, dims, keepdim, None, count))

    return rule


def picked(position: int) -> Callable[[Call], Sharding | None]:
    """Make the rule of kthvalue, mode, median of one dim, named by the argument at ``position`` (or the last): values
    and indices. A median of all has none.
    """

    def rule(call: Call) -> Sharding | None:
        one = call.inputs[0]
        count = len(call.output_shapes())
        if len(call.inputs) != 1 or not one.ndim or count != 2:
            return None
        dims = along(call, position, "dim", -1)
        return Sharding(_layout(call, dims, bool(call.arg(position + 1, "keepdim", False)), None, 2))

    return rule


def named_norm(call: Call) -> Sharding | None:
    """``linalg.norm(x, ord, dim, keepdim)`` and ``linalg.matrix_norm``, of matrices: dims that are not named stay."""
    default = (-2, -1) if call.name == "linalg_matrix_norm" else None
    if len(call.inputs) != 1 or not call.inputs[0].ndim:
        return None
    return Sharding(_layout(call, along(call, 2, "dim", default), bool(call.arg(3, "keepdim", False)), None, 1))


def aminmax(call: Call) -> Sharding | None:
    """Return the least and the largest; each partial in its own way where a reduced dim is sharded."""
    low, high = extreme("min")(call), extreme("max")(call)
    if low is None or high is None:
        return None
    pairs = zip(low.choices, high.choices, strict=False)
    return Sharding([Choice(a.inputs, (*a.outputs, *b.outputs)) for a, b in pairs if a.inputs == b.inputs])


def variance(call: Call) -> Sharding | None:
    """std, var and the pairs with mean; ``keepdim`` sits elsewhere among their overloads, so it is read off the
    result.
    """
    if len(call.inputs) != 1:
        return None
    one = call.inputs[0]
    given = call.arg(1, "dim")
    if isinstance(given, bool) or "unbiased" in call.kwargs:
        return None
    dims = set(range(one.ndim)) if given is None else along(call, 1, "dim")
    shapes = call.output_shapes()
    return Sharding(_layout(call, dims, len(shapes[0]) == one.ndim, None, len(shapes)))
