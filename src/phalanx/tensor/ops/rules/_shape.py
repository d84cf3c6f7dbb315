"""Views and other changes of shape: a sharded dim that stays in one piece keeps its sharding.

Owns the rules for view, reshape, permute and their relatives. Each is described by where every input dim goes; the
local call gets the local sizes of the chosen layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from phalanx.tensor.layout._placement import REDUCE_OPS, REPLICATE, Partial, Placement, Shard, StridedShard
from phalanx.tensor.ops._rule import Call, Choice, LocalRun, Sharding, all_replicated, norm_dim


def dim_map(
    call: Call,
    mapping: dict[int, int],
    *,
    num_outputs: int = 1,
    local: Callable[..., Any] | None = None,
    is_view: bool = True,
    even: Mapping[int, tuple[int, ...]] | None = None,
    partial: Sequence[str] = REDUCE_OPS,
    bind: Callable[[LocalRun], Callable[..., Any]] | None = None,
) -> Sharding | None:
    """Input dim i may be sharded for i in ``mapping``, and is output dim ``mapping[i]``.

    Dims in ``even`` may only be sharded into shards that divide the given sizes. What is partial by an operation in
    ``partial`` stays so.
    """
    if len(call.inputs) != 1:
        return None
    spec = call.inputs[0].spec
    choices: list[Choice] = []
    for p in dict.fromkeys(spec.placements):
        if isinstance(p, Shard) and p.dim in mapping:
            choices.append(Choice((p,), (p.on_dim(mapping[p.dim]),) * num_outputs))
        elif isinstance(p, Partial) and p.reduce_op in partial:
            choices.append(Choice((p,), (p,) * num_outputs))
    choices.append(all_replicated(call, num_outputs))
    choices += [
        Choice((Shard(i),), (Shard(o),) * num_outputs)
        for i, o in mapping.items()
        if Shard(i) not in spec.placements and spec.shape[i] > 1
    ]

    def valid(placements: Sequence[tuple[Placement, ...]]) -> bool:
        for dim, sizes in (even or {}).items():
            ways = [p for p in placements[0] if isinstance(p, Shard) and p.dim == dim]
            if any(type(p) is not Shard for p in ways):
                return False
            parts = 1
            for p, size in zip(placements[0], call.axis_sizes, strict=True):
                parts *= size if isinstance(p, Shard) and p.dim == dim else 1
            if parts > 1 and any(n % parts for n in sizes):
                return False
        return True

    return Sharding(choices, local=local, valid=valid if even else None, is_view=is_view, bind=bind)


def groups_of(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Split both shapes into runs of equal product: (input dims, output dims) of each.

    >>> groups_of((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    result: list[tuple[list[int], list[int]]] = []
    i = o = 0
    while i < len(before) or o < len(after):
        ins, outs = [], []
        left, right = 1, 1
        if i < len(before):
            left, i, ins = before[i], i + 1, [i]
        if o < len(after):
            right, o, outs = after[o], o + 1, [o]
        while left != right:
            if left < right and i < len(before):
                left, i, ins = left * before[i], i + 1, [*ins, i]
            elif right < left and o < len(after):
                right, o, outs = right * after[o], o + 1, [*outs, o]
            else:
                return None
        result.append((ins, outs))
    return result


def reshape(call: Call) -> Sharding | None:
    """view, reshape, flatten...: the first dim of each run of dims can be sharded, into equal shards, or one that comes
    later in a run that becomes one dim (``_add_strided``).
    """
    if len(call.inputs) != 1:
        return None
    before, after = call.inputs[0].shape, call.output_shapes()[0]
    if 0 in before:
        return None
    groups = groups_of(before, after)
    if groups is None:
        return None
    mapping: dict[int, int] = {}
    leading: dict[int, tuple[int, ...]] = {}
    for ins, outs in groups:
        real_ins = [d for d in ins if before[d] > 1]
        real_outs = [d for d in outs if after[d] > 1]
        if not real_ins or not real_outs:
            continue
        first, onto = real_ins[0], real_outs[0]
        mapping[first] = onto
        if len(real_ins) > 1 or len(real_outs) > 1:
            leading[first] = (before[first], after[onto])
    is_view = call.op.aliasing != "if_needed"
    sharding = dim_map(call, mapping, bind=_to_local_shape, is_view=is_view, even=leading)
    assert sharding is not None, "there is one input"
    _add_strided(call, sharding, groups, after)
    return sharding


def _add_strided(call: Call, sharding: Sharding, groups: Groups, after: Sequence[int]) -> None:
    """Let an inner dim of a flattened run stay sharded, as a strided shard of the result, and one become a dim again.

    Only of equal shards, and where no other axis shards a dim of that run.
    """
    one = call.inputs[0]
    before, own = one.shape, {}
    for p in dict.fromkeys(one.spec.placements):
        found = _strided_onto(p, groups, before, after)
        if found is not None:
            own[p] = found
            sharding.choices.insert(0, Choice((p,), (found[0],)))
    checked = sharding.valid

    def valid(placements: Sequence[tuple[Placement, ...]]) -> bool:
        plain = [REPLICATE if p in own else p for p in placements[0]]
        for axis, p in enumerate(placements[0]):
            if p not in own:
                continue
            _, dims, size = own[p]
            alone = not any(isinstance(q, Shard) and q.dim in dims for a, q in enumerate(placements[0]) if a != axis)
            if not alone or size % call.axis_sizes[axis]:
                return False
        return checked is None or checked([tuple(plain)])

    if own:
        sharding.valid = valid


Groups = list[tuple[list[int], list[int]]]


def _strided_onto(
    p: Placement, groups: Groups, before: Sequence[int], after: Sequence[int]
) -> tuple[Placement, list[int], int] | None:
    """Say which placement of the result a shard inside of a run is, the run's dims, and the size that must be even."""
    if not isinstance(p, Shard):
        return None
    ins, outs = next((ins, outs) for ins, outs in groups if p.dim in ins)
    outer = [d for d in ins if before[d] > 1]
    inner = [d for d in outs if after[d] > 1]
    if type(p) is Shard and len(inner) == 1 and p.dim in outer[1:]:
        factor = math.prod(before[d] for d in outer[: outer.index(p.dim)])
        return StridedShard(inner[0], factor), ins, before[p.dim]
    if isinstance(p, StridedShard) and outer == [p.dim]:
        for count, dim in enumerate(inner[1:], 1):
            if math.prod(after[d] for d in inner[:count]) == p.split_factor:
                return Shard(dim), ins, after[dim]
    return None


def with_strided(call: Call, choices: list[Choice]) -> list[Choice]:
    """``choices``, and before them those with strided shards that the inputs have in place of plain ones: what holds of
    the shards of a dim, by whatever indices, if all that are sharded have as many.
    """
    found: list[Choice] = []
    for way in dict.fromkeys(p for one in call.inputs for p in one.spec.placements if type(p) is StridedShard):
        sizes = {one.shape[way.dim] for one in call.inputs if way in one.spec.placements}
        for choice in choices:
            cut = {one.shape[p.dim] for p, one in zip(choice.inputs, call.inputs, strict=True) if type(p) is Shard}
            if cut and cut == sizes:
                inputs, outputs = (tuple(_like(way, p) for p in side) for side in (choice.inputs, choice.outputs))
                found.append(Choice(inputs, outputs))
    return [*found, *choices]


def _like(way: StridedShard, p: Placement) -> Placement:
    return way.on_dim(p.dim) if type(p) is Shard else p


def _to_local_shape(run: LocalRun) -> Callable[..., Any]:
    shape = run.outputs[0].local_shape
    if run.func is torch.Tensor.view or run.func is torch.Tensor.view_as:
        return lambda input, *args, **kwargs: input.view(shape)
    return lambda input, *args, **kwargs: input.reshape(shape)


def view(call: Call) -> Sharding | None:
    """``view(dtype)`` reinterprets bits: only between dtypes of one size."""
    target = call.arg(1, "dtype")
    if isinstance(target, torch.dtype):
        if target.itemsize != call.inputs[0].dtype.itemsize or call.inputs[0].is_partial:
            return None
        return dim_map(call, {d: d for d in range(call.inputs[0].ndim)})
    if call.inputs[0].ndim == 0:
        return None
    return reshape(call)


def permute(call: Call) -> Sharding | None:
    """permute, transpose, movedim...: the order is found by permuting numbered dims."""
    if len(call.inputs) != 1:
        return None
    one = call.inputs[0]
    probe = torch.empty([d + 2 for d in range(one.ndim)], device="meta")
    args = [probe if arg is one else arg for arg in call.args]
    shape = list(call.func(*args, **call.kwargs).shape)
    if sorted(shape) != list(probe.shape):
        return None
    return dim_map(call, {n - 2: o for o, n in enumerate(shape)})


def squeeze(call: Call) -> Sharding | None:
    one = call.inputs[0]
    dims = call.arg(1, "dim")
    chosen = range(one.ndim) if dims is None else [norm_dim(d, one.ndim) for d in as_tuple(dims)]
    gone = {d for d in chosen if one.ndim and one.shape[d] == 1}
    kept = [d for d in range(one.ndim) if d not in gone]
    return dim_map(call, {d: o for o, d in enumerate(kept)}, local=_squeeze_local(sorted(gone)))


def _squeeze_local(gone: list[int]) -> Callable[..., Any]:
    # by number: a local dim of size one may be a shard of a longer one, which must stay
    return lambda run, args, kwargs: args[0].squeeze(gone)


def unsqueeze(call: Call) -> Sharding | None:
    one = call.inputs[0]
    at = call.arg(1, "dim") % (one.ndim + 1)
    return dim_map(call, {d: d + (d >= at) for d in range(one.ndim)})


def expand(call: Call) -> Sharding | None:
    """expand, expand_as, broadcast_to: dims of size one are repeated, the others stay sharded."""
    one, out = call.inputs[0], call.output_shapes()[0]
    if len(call.inputs) != 1:
        return None
    shift = len(out) - one.ndim
    mapping = {d: d + shift for d in range(one.ndim) if one.shape[d] == out[d + shift]}
    return dim_map(call, mapping, local=lambda run, args, kwargs: args[0].expand(run.outputs[0].local_shape))


def along(call: Call, position: int, name: str, default: Any = None) -> set[int]:
    """Return the dims that an argument names, non-negative; all of them for None."""
    ndim = call.inputs[0].ndim
    given = call.arg(position, name, default)
    return set(range(ndim)) if given is None or not ndim else {norm_dim(d, ndim) for d in as_tuple(given)}


def narrow(call: Call) -> Sharding | None:
    dim = along(call, 1, "dim")
    return dim_map(call, {d: d for d in range(call.inputs[0].ndim) if d not in dim})


def select(call: Call) -> Sharding | None:
    (dim,) = along(call, 1, "dim")
    return dim_map(call, {d: d - (d > dim) for d in range(call.inputs[0].ndim) if d != dim})


def unbind(call: Call) -> Sharding | None:
    one = call.inputs[0]
    (dim,) = along(call, 1, "dim", 0)
    mapping = {d: d - (d > dim) for d in range(one.ndim) if d != dim}
    return dim_map(call, mapping, num_outputs=one.shape[dim])


def split(fixed: int | None) -> Callable[[Call], Sharding | None]:
    """Make the rule of split, chunk, hsplit...: dims other than the one that is split stay sharded.

    ``fixed``: the dim of functions that take none; the last, where a tensor has fewer.
    """

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1 or not call.inputs[0].ndim:
            return None
        one = call.inputs[0]
        dim = norm_dim(call.arg(2, "dim", 0), one.ndim) if fixed is None else min(fixed, one.ndim - 1)
        count = len(call.output_shapes())
        mapping = {d: d for d in range(one.ndim) if d != dim or count == 1}
        return dim_map(call, mapping, num_outputs=count)

    return rule


def untouched_dims(
    *names: tuple[int, str, Any], partial: Sequence[str] = (), num_outputs: int = 1
) -> Callable[[Call], Sharding | None]:
    """Dims that the named arguments do not mention stay sharded: flip, roll, cumulative sums..."""

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1 or not call.inputs[0].ndim:
            return None
        touched: set[int] = set()
        for position, name, default in names:
            touched |= along(call, position, name, default)
        if names[-1][1] == "dims":  # ``x.flip(0, 1)``: each dim an argument of its own
            touched |= {norm_dim(d, call.inputs[0].ndim) for d in call.args[names[-1][0] :] if type(d) is int}
        keep = {d: d for d in range(call.inputs[0].ndim) if d not in touched}
        return dim_map(call, keep, is_view=False, partial=partial, num_outputs=num_outputs)

    return rule


def rows(position: int, name: str, default: Any = -1, num_outputs: int = 1) -> Callable[[Call], Sharding | None]:
    """Make the rule of softmax, sorting and others of rows: any dim but the row's own, which an argument names, may be
    sharded. A tensor sharded along the row is resharded along another dim (one exchange) rather than gathered.
    """

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1 or not call.inputs[0].ndim:
            return None
        one = call.inputs[0]
        given = call.arg(position, name, default)
        if given is None or not isinstance(given, int) or isinstance(given, bool):
            return None
        row = along(call, position, name, default)
        choices = [
            Choice((Shard(d),), (Shard(d),) * num_outputs)
            for d in sorted(range(one.ndim), key=lambda d: Shard(d) not in one.spec.placements)
            if d not in row
        ]
        return Sharding([*with_strided(call, choices), all_replicated(call, num_outputs)])

    return rule


def as_tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
