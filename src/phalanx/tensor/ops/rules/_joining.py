"""Joining, selecting and placing: cat, stack, indexing, gather, scatter, pad, triangles.

Owns their rules. In all of them some dims are only carried along; those may stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.tensor.layout._placement import IDEMPOTENT_OPS, LINEAR_OPS, REPLICATE, Partial, Shard
from phalanx.tensor.ops._rule import (
    Call,
    Choice,
    In,
    LocalRun,
    Sharding,
    all_replicated,
    none_empty,
    norm_dim,
)
from phalanx.tensor.ops.rules._pointwise import broadcast_shape
from phalanx.tensor.ops.rules._shape import dim_map


def _carried(
    call: Call, dims: Sequence[int], onto: Callable[[int], int] = lambda d: d, partial: Sequence[str] = ()
) -> Sharding:
    """Return all inputs sharded alike along one of ``dims``, which is output dim ``onto(dim)``; or all partial."""
    count = len(call.inputs)
    have = [p for one in call.inputs for p in one.spec.placements]
    ordered = sorted(dims, key=lambda d: -sum(p == Shard(d) for p in have))
    choices = [Choice((Shard(d),) * count, (Shard(onto(d)),)) for d in ordered]
    ops = [op for op in partial if any(p.is_partial(op) for p in have)]
    choices += [Choice((Partial(op),) * count, (Partial(op),)) for op in ops]
    return Sharding([*choices, all_replicated(call, 1)])


def cat(call: Call) -> Sharding | None:
    ndim = max(one.ndim for one in call.inputs)
    if any(one.ndim != ndim for one in call.inputs) or not ndim:
        return None  # torch allows an empty 1-d tensor among others
    dim = norm_dim(call.arg(1, "dim", 0), ndim)
    return _carried(call, [d for d in range(ndim) if d != dim], partial=_passing(call))


def stack(call: Call) -> Sharding | None:
    ndim = call.inputs[0].ndim
    dim = call.arg(1, "dim", 0) % (ndim + 1)
    return _carried(call, range(ndim), lambda d: d + (d >= dim), partial=_passing(call))


def _passing(call: Call) -> Sequence[str]:
    """Say which reductions may be done later where elements are only put together; of floating dtypes all."""
    inexact = all(one.dtype.is_floating_point for one in call.inputs)
    return ("sum", *IDEMPOTENT_OPS) if inexact else ()


def index_select(call: Call) -> Sharding | None:
    if len(call.inputs) != 2:
        return None
    one = call.inputs[0]
    dim = norm_dim(call.arg(1, "dim"), one.ndim)
    choices = [Choice((Shard(d), REPLICATE), (Shard(d),)) for d in range(one.ndim) if d != dim]
    if call.inputs[1].ndim == 1 and one.ndim:
        choices.append(Choice((REPLICATE, Shard(0)), (Shard(dim),)))
    choices += [Choice((p, REPLICATE), (p,)) for p in one.spec.placements if isinstance(p, Partial)]
    return Sharding([*sorted(choices, key=lambda c: c.inputs[0] not in one.spec.placements), all_replicated(call, 1)])


def gather(call: Call) -> Sharding | None:
    """``gather(input, dim, index)``: dims other than ``dim`` in which both have the same size."""
    if len(call.inputs) != 2 or not call.inputs[0].ndim or call.inputs[0].ndim != call.inputs[1].ndim:
        return None
    one, index = call.inputs
    dim = norm_dim(call.arg(1, "dim"), one.ndim)
    dims = [d for d in range(one.ndim) if d != dim and one.shape[d] == index.shape[d]]
    sharding = _carried(call, dims)
    sharding.choices.insert(0, Choice((REPLICATE, Shard(dim)), (Shard(dim),)))
    return sharding


def take_along_dim(call: Call) -> Sharding | None:
    """``take_along_dim(input, index, dim)``: as ``gather``, of dims that are broadcast too; elements are only put
    elsewhere, so that partial ones may be.
    """
    if call.arg(2, "dim") is None or len(call.inputs) != 2:
        return None
    one, index = call.inputs
    if one.ndim != index.ndim or not one.ndim:
        return None
    dim = norm_dim(call.arg(2, "dim"), one.ndim)
    choices = []
    for d, (size, count) in enumerate(zip(one.shape, index.shape, strict=True)):
        own = REPLICATE if d == dim or size != max(size, count) else Shard(d)
        choices.append(Choice((own, REPLICATE if d != dim and count != max(size, count) else Shard(d)), (Shard(d),)))
    choices += [Choice((p, REPLICATE), (p,)) for p in dict.fromkeys(one.spec.placements) if isinstance(p, Partial)]
    return Sharding([*choices, all_replicated(call, 1)])


def scatter(call: Call) -> Sharding | None:
    """``scatter(input, dim, index, src)``: dims other than ``dim`` in which all have the same size."""
    one = call.inputs[0]
    if len(call.inputs) < 2 or not one.ndim or any(other.ndim != one.ndim for other in call.inputs):
        return None
    dim = norm_dim(call.arg(1, "dim"), one.ndim)
    dims = [d for d in range(one.ndim) if d != dim and all(other.shape[d] == one.shape[d] for other in call.inputs)]
    return _carried(call, dims)


def inserted(call: Call) -> Sharding | None:
    """``select_scatter(x, src, dim, index)``, ``slice_scatter(x, src, dim, ...)``, ``diagonal_scatter(x, src, offset,
    dim1, dim2)``: dims that the source has in full, and elements that are put in a place, not changed.
    """
    if len(call.inputs) != 2 or call.args[:2] != tuple(call.inputs):
        return None
    one = call.inputs[0]
    if call.name == "diagonal_scatter":
        touched = {norm_dim(call.arg(3, "dim1", 0), one.ndim), norm_dim(call.arg(4, "dim2", 1), one.ndim)}
    else:
        touched = {norm_dim(call.arg(2, "dim", 0), one.ndim)}
    kept = [d for d in range(one.ndim) if d not in touched]
    onto = kept if call.name == "slice_scatter" else range(len(kept))
    choices = [Choice((Shard(d), Shard(o)), (Shard(d),)) for d, o in zip(kept, onto, strict=True)]
    have = [p for each in call.inputs for p in each.spec.placements]
    choices += [Choice((Partial(op),) * 2, (Partial(op),)) for op in _passing(call) if Partial(op) in have]
    return Sharding([*choices, all_replicated(call, 1)])


def index_write(call: Call) -> Sharding | None:
    """``index_add(x, dim, index, source)``, index_copy, and index_fill with a number or a tensor for its value."""
    one, *others = call.inputs
    if call.args[:1] != (one,) or not others or call.arg(2, "index") is not others[0]:
        return None
    dim = norm_dim(call.arg(1, "dim"), one.ndim)
    source = others[1:]
    fills = call.name == "index_fill"
    if not fills and (len(source) != 1 or source[0].ndim != one.ndim):
        return None
    choices = [
        Choice((Shard(d), REPLICATE, *(REPLICATE if fills else Shard(d) for _ in source)), (Shard(d),))
        for d in range(one.ndim)
        if d != dim
    ]
    for op in _passing_index(call, bool(source)):
        if any(p.is_partial(op) for each in (one, *source) for p in each.spec.placements):
            partial = Partial(op)
            choices.append(Choice((partial, REPLICATE, *(partial for _ in source)), (partial,)))
    return Sharding([*sorted(choices, key=lambda c: c.inputs[0] not in one.spec.placements), all_replicated(call, 1)])


def _passing_index(call: Call, from_tensor: bool) -> Sequence[str]:
    if not all(one.dtype.is_floating_point for one in (call.inputs[0], *call.inputs[2:])):
        return ()
    if call.name == "index_add":
        return LINEAR_OPS
    return ("sum", *IDEMPOTENT_OPS) if from_tensor else IDEMPOTENT_OPS  # a number is itself on every rank


def take(call: Call) -> Sharding | None:
    """``take(x, index)``: of the whole tensor, by numbers that may be sharded."""
    if len(call.inputs) != 2:
        return None
    one, index = call.inputs
    choices = [Choice((REPLICATE, Shard(d)), (Shard(d),)) for d in range(index.ndim)]
    choices += [Choice((p, REPLICATE), (p,)) for p in dict.fromkeys(one.spec.placements) if isinstance(p, Partial)]
    return Sharding([*choices, all_replicated(call, 1)])


def pad(call: Call) -> Sharding | None:
    """Dims that get no padding stay sharded. Padding with zeros is linear."""
    one = call.inputs[0]
    amounts = call.arg(1, "pad")
    if len(call.inputs) != 1 or amounts is None:
        return None
    padded = {one.ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    plain = call.name == "constant_pad_nd"
    mode = "constant" if plain else call.arg(2, "mode", "constant")
    value = call.arg(2 if plain else 3, "value", 0)
    if mode != "constant":
        padded |= set(range(max(0, one.ndim - len(amounts) // 2), one.ndim))
    constant = IDEMPOTENT_OPS if mode == "constant" else ()  # the value is itself on every rank
    linear = ("sum", *constant) if constant and not value else constant
    keep = {d: d for d in range(one.ndim) if d not in padded}
    sharding = dim_map(call, keep, is_view=False, partial=linear)
    if sharding is not None and mode != "constant":
        sharding.valid = lambda placements: none_empty(call, placements)
    return sharding


def triangle(call: Call) -> Sharding | None:
    """tril, triu: the diagonal moves with the offset of this rank's rows and columns."""
    one = call.inputs[0]
    if one.ndim < 2 or len(call.inputs) != 1:
        return None
    diagonal = int(call.arg(1, "diagonal", 0))

    def local(run: LocalRun, args: Any, kwargs: Any) -> Any:
        spec = run.inputs[0]
        shift = spec.local_offset(one.ndim - 2) - spec.local_offset(one.ndim - 1)
        return run.func(args[0], diagonal + shift)

    sharding = dim_map(call, {d: d for d in range(one.ndim)}, is_view=False, local=local, partial=("sum", "avg"))
    if sharding is not None:
        sharding.valid = lambda placements: all(not p.is_shard() or type(p) is Shard for p in placements[0])
    return sharding


def one_hot(call: Call) -> Sharding | None:
    count = call.arg(1, "num_classes", -1)
    if count < 0 or len(call.inputs) != 1:
        return None
    one = call.inputs[0]
    choices = [Choice((Shard(d),), (Shard(d),)) for d in range(one.ndim)]
    return Sharding([*choices, all_replicated(call, 1)])


def getitem(call: Call) -> Sharding | None:
    """Basic indexing: dims taken in full stay sharded. Index tensors select along the dims they are given for."""
    one, key = call.args[0], call.args[1]
    if not isinstance(one, In):
        return None
    keys = key if isinstance(key, tuple) else (key,)
    if len(call.inputs) == 1:
        mapping = basic_index(one.shape, keys)
        return None if mapping is None else dim_map(call, mapping, local=_index_local)
    return _index_by_tensors(call, one, keys)


def _index_by_tensors(call: Call, one: In, keys: Sequence[Any]) -> Sharding | None:
    """``x[:, i, j]`` with integer tensors: dims taken in full stay sharded; the indices' own dims come first among the
    results', or stand where the indices stood if those are neighbours.
    """
    if any(not (isinstance(k, In) or k is Ellipsis or isinstance(k, slice)) for k in keys):
        return None
    indices = [k for k in keys if isinstance(k, In)]
    used = sum(k is not Ellipsis for k in keys)
    if any(i.dtype not in (torch.int64, torch.int32) for i in indices) or sum(k is Ellipsis for k in keys) > 1:
        return None
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    full = [*keys[:at], *[slice(None)] * (one.ndim - used), *keys[at + 1 :]]
    places = [d for d, k in enumerate(full) if isinstance(k, In)]
    broad = len(broadcast_shape([i.shape for i in indices]))
    front = 0 if places[-1] - places[0] >= len(places) else places[0]
    choices = []
    for d, k in enumerate(full):
        if isinstance(k, slice) and k.indices(one.shape[d]) == (0, one.shape[d], 1):
            before = sum(isinstance(other, slice) for other in full[:d])
            onto = before if before < front else before + broad
            choices.append(Choice((Shard(d), *(REPLICATE,) * len(indices)), (Shard(onto),)))
    if len(indices) == 1:
        choices += [Choice((REPLICATE, Shard(d)), (Shard(front + d),)) for d in range(indices[0].ndim)]
    for p in dict.fromkeys(one.spec.placements):
        if isinstance(p, Partial) and p.reduce_op in ("sum", "avg"):
            choices.append(Choice((p, *(REPLICATE,) * len(indices)), (p,)))
    have = one.spec.placements
    ordered = sorted(choices, key=lambda c: c.inputs[0] not in have)
    return Sharding([*ordered, all_replicated(call, 1)])


def _index_local(run: LocalRun, args: Any, kwargs: Any) -> Any:
    return run.func(*args, **kwargs)


def basic_index(shape: Sequence[int], keys: Sequence[Any]) -> dict[int, int] | None:
    """Say where dims go that an index of ints, slices, None and ``...`` takes in full; None for other indices."""
    if any(
        isinstance(k, (bool, list, tuple)) or not (k is None or k is Ellipsis or isinstance(k, (int, slice)))
        for k in keys
    ):
        return None
    if sum(k is Ellipsis for k in keys) > 1:
        return None
    used = sum(k is not None and k is not Ellipsis for k in keys)
    whole = [slice(None)] * (len(shape) - used)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    full = [*keys[:at], *whole, *keys[at + 1 :]]
    mapping: dict[int, int] = {}
    dim = out = 0
    for k in full:
        if k is None:
            out += 1
            continue
        if isinstance(k, slice):
            if k.indices(shape[dim]) == (0, shape[dim], 1):
                mapping[dim] = out
            out += 1
        dim += 1
    return mapping


def repeat(call: Call) -> Sharding | None:
    """repeat, tile: dims that are not repeated stay sharded."""
    one, out = call.inputs[0], call.output_shapes()[0]
    shift = len(out) - one.ndim
    mapping = {d: d + shift for d in range(one.ndim) if out[d + shift] == one.shape[d]}
    return dim_map(call, mapping, is_view=False)
