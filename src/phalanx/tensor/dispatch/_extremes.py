"""The largest of a sharded dim: each rank's candidates travel, not the dim. argmax, argmin, max, min, topk.

Owns their handlers, which come before the rules and leave to them whatever needs no candidates (dims that are not
sharded) or has none (partial tensors, strided shards, empty shards). Of equals the first counts, as on one device;
candidates stand in the order of the dim, so the first of them is the first of all. Values are differentiable:
candidates are gathered by a move, whose backward gives each rank the gradient of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor.core._copied_views import checked_local
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.dispatch._distribute import redistribute_input
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.layout._placement import REPLICATE, Partial, Placement, Shard, StridedShard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import op_name
from phalanx.tensor.ops._rule import torch_keywords


class _ShardedDims:
    """A DTensor and the mesh axes that shard the dims in question."""

    def __init__(self, x: DTensor, dims: Sequence[int], op: str) -> None:
        self.spec: Spec = x._spec
        self.op = op
        self.axes = [a for a, p in enumerate(self.spec.placements) if isinstance(p, Shard) and p.dim in dims]
        self.gathered_placements: list[Placement] = [
            REPLICATE if axis in self.axes else p for axis, p in enumerate(self.spec.placements)
        ]
        self.ranks = math.prod(self.spec.mesh.shape[axis] for axis in self.axes)

    def gathered(self, local: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> Tensor:
        """Return every rank's ``local``, joined over those axes into one of ``shape``, laid out by ``placements``."""
        spec = Spec.of(self.spec.mesh, placements, shape, local.dtype)
        gathered_placements = [REPLICATE if axis in self.axes else p for axis, p in enumerate(placements)]
        return redistribute_input(wrap(local, spec), spec.with_placements(gathered_placements), self.op)

    def along(self, local: Tensor, dim: int, count: int) -> Tensor:
        """Candidates of one dim, ``count`` from each rank."""
        shape = list(self.spec.shape)
        shape[dim] = self.ranks * count
        return self.gathered(local, shape, self.spec.placements)

    def result(self, local: Tensor, dim: int, count: int, keepdim: bool) -> DTensor:
        """``local`` holds ``count`` results along ``dim`` (one, to be dropped unless ``keepdim``)."""
        shape = [count if d == dim else n for d, n in enumerate(self.spec.shape)]
        if keepdim:
            return wrap(local, Spec.of(self.spec.mesh, self.gathered_placements, shape, local.dtype))
        outer = [p.on_dim(p.dim - (p.dim > dim)) if isinstance(p, Shard) else p for p in self.gathered_placements]
        return wrap(local.squeeze(dim), Spec.of(self.spec.mesh, outer, shape[:dim] + shape[dim + 1 :], local.dtype))


def _sharded_along(x: Any, dim: Any, op: str, at_least: int = 1) -> _ShardedDims | None:
    """None unless ``dim`` of ``x`` is sharded and every rank holds ``at_least`` so many of it."""
    if not isinstance(x, DTensor) or type(dim) is not int or not -x.ndim <= dim < x.ndim:
        return None
    spec = x._spec
    if any(isinstance(p, Partial) or type(p) is StridedShard for p in spec.placements):
        return None
    found = _ShardedDims(x, [dim % x.ndim], op)
    return found if found.axes and spec.smallest_shard(dim % x.ndim) >= at_least else None


def _given(names: Sequence[str], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **torch_keywords(kwargs or {})}


def arg_extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """argmax, argmin, of one dim or of all."""
    given = _given(("x", "dim", "keepdim"), args, kwargs)
    x, dim, keepdim = args[0], given.get("dim"), bool(given.get("keepdim", False))
    op = op_name(func).base
    if dim is None and not keepdim and "out" not in given:
        flat = _flat_extreme(func, x, op)
        return run_rule(func, args, kwargs) if flat is None else flat
    sharded = None if "out" in given else _sharded_along(x, dim, op)
    if sharded is None:
        return run_rule(func, args, kwargs)
    dim = dim % x.ndim
    pick = torch.max if op == "argmax" else torch.min
    values, indices = pick(checked_local(x).detach(), dim, keepdim=True)
    best = func(sharded.along(values, dim, 1), dim, True)
    found = sharded.along(indices + sharded.spec.local_offset(dim), dim, 1).gather(dim, best)
    return sharded.result(found, dim, 1, keepdim)


def _flat_extreme(func: Any, x: Any, op: str) -> DTensor | None:
    """Return the number of the first extreme element of all: each rank sends its own and its number."""
    if not isinstance(x, DTensor) or not x.ndim:
        return None
    spec = x._spec
    sharded = _ShardedDims(x, range(x.ndim), op)
    odd = any(isinstance(p, Partial) or type(p) is StridedShard for p in spec.placements)
    if not sharded.axes or odd or spec.has_empty_shard:
        return None
    local = checked_local(x).detach()
    at = func(local)
    number = torch.zeros_like(at)
    for d, place in enumerate(torch.unravel_index(at, local.shape)):
        number = number * spec.shape[d] + place + spec.local_offset(d)
    placements = [Shard(0) if axis in sharded.axes else REPLICATE for axis in range(spec.mesh.ndim)]
    values = sharded.gathered(local.reshape(-1)[at].reshape(1), (sharded.ranks,), placements)
    numbers = sharded.gathered(number.reshape(1), (sharded.ranks,), placements)
    best = values[func(values)]
    equal = values.isnan() if bool(best.isnan()) else values == best
    return wrap(numbers[equal].min(), Spec.of(spec.mesh, spec.replicated.placements, (), torch.int64))


def extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """``max(x, dim)``, ``min(x, dim)``: values and where they are. Other forms are the rules'."""
    given = _given(("x", "dim", "keepdim"), args, kwargs)
    x, dim, keepdim = args[0], given.get("dim"), bool(given.get("keepdim", False))
    sharded = None if "out" in given else _sharded_along(x, dim, op_name(func).base)
    if sharded is None:
        return run_rule(func, args, kwargs)
    dim = dim % x.ndim
    values, indices = func(checked_local(x), dim, keepdim=True)
    best = func(sharded.along(values, dim, 1), dim, keepdim=True)
    found = sharded.along(indices + sharded.spec.local_offset(dim), dim, 1).gather(dim, best.indices)
    return type(best)((sharded.result(best.values, dim, 1, keepdim), sharded.result(found, dim, 1, keepdim)))


def topk(func: Any, args: Any, kwargs: Any) -> Any:
    """``topk(x, k, dim, largest, sorted)``: the best of the ranks' best."""
    given = _given(("x", "k", "dim", "largest", "sorted"), args, kwargs)
    x, count, dim = args[0], given["k"], given.get("dim", -1)
    sharded = (
        None if "out" in given or type(count) is not int else _sharded_along(x, dim, "topk", at_least=max(1, count))
    )
    if sharded is None or _are_more_bytes(sharded, count, x.shape[dim]):
        return run_rule(func, args, kwargs)
    dim = dim % x.ndim
    order = (bool(given.get("largest", True)), bool(given.get("sorted", True)))
    values, indices = func(checked_local(x), count, dim, *order)
    best = func(sharded.along(values, dim, count), count, dim, *order)
    found = sharded.along(indices + sharded.spec.local_offset(dim), dim, count).gather(dim, best.indices)
    return type(best)((sharded.result(best.values, dim, count, True), sharded.result(found, dim, count, True)))


def _are_more_bytes(sharded: _ShardedDims, count: int, size: int) -> bool:
    """Return whether ``count`` candidates of each rank, values and numbers, are more than all that there is."""
    width = sharded.spec.dtype.itemsize
    return sharded.ranks * count * (width + torch.int64.itemsize) > size * width
