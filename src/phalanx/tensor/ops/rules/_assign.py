"""Assignment by index, such as ``x[1:3, 0] = v`` and ``x[rows, :, columns] = v``: nothing of the tensor moves.

Owns the rule for ``__setitem__``. Each rank writes what falls into its own shard: of a slice of a sharded dim its
share, of positions given by index tensors those that it holds. The value is replicated along dims that are selected
from, and sharded like the tensor along dims that are taken in full. Every rank touches the value, also where it writes
nothing of it, because the value's gradient is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import is_alias_of
from phalanx.tensor.layout._placement import REPLICATE, Partial, Placement, Shard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._rule import Call, Choice, In, LocalRun, Sharding

_INTEGERS = (torch.int64, torch.int32)


def full_keys(key: Any, ndim: int) -> list[Any] | None:
    """Return one key for each dim, ``...`` written out; None where a key is none of int, slice, tensor or list of
    ints."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(k is Ellipsis for k in keys) > 1 or len(keys) - (Ellipsis in map(_identity, keys)) > ndim:
        return None
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    full = [
        *keys[:at],
        *[slice(None)] * (ndim - len([k for k in keys if k is not Ellipsis])),
        *keys[at + 1 :],
    ]
    return full if all(map(_is_key, full)) else None


def _identity(key: Any) -> Any:
    return key if key is Ellipsis else None  # ``in`` would compare tensors


def _is_key(key: Any) -> bool:
    if isinstance(key, list):
        return bool(key) and all(type(k) is int for k in key)
    if isinstance(key, (In, Tensor)):
        return key.dtype in _INTEGERS
    return isinstance(key, slice) or type(key) is int


def setitem(call: Call) -> Sharding | None:
    one, key, value = call.args
    if not isinstance(one, In) or not one.ndim or isinstance(value, (list, tuple)):
        return None
    keys = full_keys(key, one.ndim)
    by_tensors = [] if keys is None else [k for k in keys if isinstance(k, (In, list))]
    if keys is None or (by_tensors and any(type(k) is int for k in keys)):
        return None
    onto = _result_dims(keys)
    rank = _index_ndim(keys) + sum(isinstance(k, slice) for k in keys)
    given = value if isinstance(value, In) else None
    if given is not None and given.ndim > rank:
        return None
    choices = []
    for p in dict.fromkeys(one.spec.placements):
        placed = _value_placement(p, keys, one, onto, given, rank)
        if placed is not None:
            others = [placed if other is given else REPLICATE for other in call.inputs[1:]]
            choices.append(Choice((p, *others), (p,)))
    return Sharding(choices, local=_assign_by_tensors if by_tensors else _assign)


def _value_placement(
    p: Placement, keys: list[Any], one: In, onto: dict[int, int], given: In | None, rank: int
) -> Placement | None:
    """Say how the value lies on an axis where the tensor lies as ``p``; None: this assignment has no rule there."""
    if isinstance(p, Partial):
        return p if given is not None and given.dtype is one.dtype else None
    if not isinstance(p, Shard):
        return REPLICATE
    key = keys[p.dim]
    if not (isinstance(key, slice) and key.indices(one.shape[p.dim]) == (0, one.shape[p.dim], 1)):
        partly = isinstance(key, slice) and any(isinstance(k, (In, list)) for k in keys)
        return None if partly or type(p) is not Shard else REPLICATE
    if given is None:
        return REPLICATE
    own = onto[p.dim] - (rank - given.ndim)
    return REPLICATE if own < 0 or given.shape[own] == 1 else p.on_dim(own)


def _index_ndim(keys: Sequence[Any]) -> int:
    return max((1 if isinstance(k, list) else k.ndim for k in keys if isinstance(k, (In, Tensor, list))), default=0)


def _front(keys: Sequence[Any]) -> int:
    """Say where the dims of index tensors stand in the result: in their place if they are neighbours, else first."""
    places = [d for d, k in enumerate(keys) if not isinstance(k, slice)]
    return 0 if not places or places[-1] - places[0] >= len(places) else places[0]


def _result_dims(keys: Sequence[Any]) -> dict[int, int]:
    """Say which dim of the result each sliced dim is."""
    if not any(isinstance(k, (In, Tensor, list)) for k in keys):
        return {d: sum(isinstance(o, slice) for o in keys[:d]) for d, k in enumerate(keys) if isinstance(k, slice)}
    broad, front = _index_ndim(keys), _front(keys)
    before = {d: sum(isinstance(o, slice) for o in keys[:d]) for d, k in enumerate(keys) if isinstance(k, slice)}
    return {d: at if at < front else at + broad for d, at in before.items()}


def _assign(run: LocalRun, args: Any, kwargs: Any) -> None:
    """Ints and slices. Ints count as slices of one, so that ranks which hold none of it still take part."""
    x, key, value = args
    spec = run.inputs[0]
    keys = full_keys(key, x.dim())
    assert keys is not None, "the rule looked at the keys"
    if isinstance(value, Tensor):
        value = value.reshape([*[1] * (sum(isinstance(k, slice) for k in keys) - value.dim()), *value.shape])
        for d, k in enumerate(keys):
            value = value if isinstance(k, slice) else value.unsqueeze(d)
    index = []
    for d, k in enumerate(keys):
        chosen = range(spec.shape[d])[k] if isinstance(k, slice) else _one(k, spec.shape[d], d)
        if chosen == range(spec.shape[d]) or not spec.shards(d):
            index.append(slice(chosen.start, chosen.stop, chosen.step) if not spec.shards(d) else slice(None))
            continue
        first, count, part = _own_share(chosen, spec.local_offset(d), spec.local_shape[d])
        index.append(part)
        if isinstance(value, Tensor) and value.shape[d] != 1:
            if value.shape[d] != len(chosen):
                raise RuntimeError(
                    f"__setitem__ on {spec!r}: {len(chosen)} places in dim {d}, but {value.shape[d]} values"
                )
            value = value.narrow(d, first, count)
    x[tuple(index)] = _apart(value, x)


def _apart(value: Any, x: Tensor) -> Any:
    """``value`` in memory of its own: ``x[i] += 1`` assigns a part of x to itself, which torch may not recognise."""
    shared = isinstance(value, Tensor) and is_alias_of(value, x)
    return value.clone() if shared else value


def _one(key: int, size: int, dim: int) -> range:
    if not -size <= key < size:
        raise IndexError(f"index {key} is out of bounds for dimension {dim} with size {size}")
    return range(key % size, key % size + 1)


def _own_share(chosen: range, offset: int, size: int) -> tuple[int, int, slice]:
    """Of the chosen indices those in [offset, offset + size): the first one's number, how many, and where they are."""
    first = min(len(chosen), max(0, -(-(offset - chosen.start) // chosen.step)))
    last = min(len(chosen), max(first, -(-(offset + size - chosen.start) // chosen.step)))
    start = chosen.start + first * chosen.step - offset
    count = last - first
    return (
        first,
        count,
        slice(start, start + (count - 1) * chosen.step + 1, chosen.step) if count else slice(0, 0),
    )


def _assign_by_tensors(run: LocalRun, args: Any, kwargs: Any) -> None:
    """Positions given by integer tensors, which are replicated on every rank; slices beside them stay sharded."""
    x, key, value = args
    spec = run.inputs[0]
    keys = full_keys(key, x.dim())
    assert keys is not None, "the rule looked at the keys"
    places = [d for d, k in enumerate(keys) if not isinstance(k, slice)]
    indices = [torch.as_tensor(keys[d], device=x.device) for d in places]
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    own: Tensor = torch.ones(shape, dtype=torch.bool, device=x.device)
    flat = []
    for d, index in zip(places, indices, strict=True):
        here, inside = _held(index.expand(shape), spec, d)
        flat.append(here)
        own = own if inside is None else own & inside
    if isinstance(value, Tensor) and value.dim():
        sizes = [len(range(n)[k]) for n, k in zip(x.shape, keys, strict=True) if isinstance(k, slice)]
        front = _front(keys)
        value = value.expand([*sizes[:front], *shape, *sizes[front:]])
        value = value.flatten(front, front + len(shape) - 1) if shape else value.unsqueeze(front)
        value = value.index_select(front, own.reshape(-1).nonzero().squeeze(1))
    for d, here in zip(places, flat, strict=True):
        keys[d] = here[own]
    x[tuple(keys)] = _apart(value, x)


def _held(index: Tensor, spec: Spec, dim: int) -> tuple[Tensor, Tensor | None]:
    """Global positions along ``dim`` as local ones, and which of them this rank holds (None: all)."""
    size = spec.shape[dim]
    if bool(((index < -size) | (index >= size)).any()):
        raise IndexError(f"index out of range for dimension {dim} of {spec!r}, which has size {size}")
    index = torch.where(index < 0, index + size, index)
    if not spec.shards(dim):
        return index, None
    local = index - spec.local_offset(dim)
    return local, (local >= 0) & (local < spec.local_shape[dim])
