"""Functions that torch itself makes of others: stacks, grids, norms by name, and those that take numbers as tensors.

Owns their handlers, which call those others on DTensors: each has a rule, and nothing is gathered that none of them
needs. What they are made of is what torch documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from phalanx._torch_private import nn_operations
from phalanx._without_modes import without_user_modes
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.dispatch._fallback import run_replicated, write_out
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.ops._registry import op_name
from phalanx.tensor.ops._rule import torch_keywords


def _joining(join: Callable[[list[Any]], Any]) -> Callable[[Any, Any, Any], Any]:
    """Make the handler of a function of a list, which ``join`` writes as other functions."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(kwargs or {})
        out = given.pop("out", None)
        tensors = args[0] if args else given.pop("tensors", None)
        if given or len(args) > 1 or not isinstance(tensors, (list, tuple)) or not tensors:
            return run_replicated(func, args, kwargs)
        return join(list(tensors)) if out is None else write_out(join(list(tensors)), out)

    return handler


def _side_by_side(tensors: list[Any]) -> Any:
    flat = [torch.atleast_1d(t) for t in tensors]
    return torch.cat(flat, 0 if flat[0].dim() == 1 else 1)


hstack = _joining(_side_by_side)
vstack = _joining(lambda tensors: torch.cat([torch.atleast_2d(t) for t in tensors], 0))
dstack = _joining(lambda tensors: torch.cat([torch.atleast_3d(t) for t in tensors], 2))
column_stack = _joining(lambda tensors: torch.cat([t if t.dim() > 1 else t.reshape(-1, 1) for t in tensors], 1))


def _listed(args: Any) -> list[Any]:
    """Return the tensors that a function got one by one or in a list."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)


def at_least(func: Any, args: Any, kwargs: Any) -> Any:
    """atleast_1d and relatives, of a tensor or of several."""
    if kwargs or (len(args) == 1 and isinstance(args[0], torch.Tensor)):
        return run_rule(func, args, kwargs)
    return tuple(func(t) for t in _listed(args))


def meshgrid(func: Any, args: Any, kwargs: Any) -> Any:
    """Make each tensor a dim of the grid, expanded along the others."""
    tensors, indexing = _listed(args), (kwargs or {}).get("indexing") or "ij"
    if indexing not in ("ij", "xy") or any(t.dim() > 1 for t in tensors) or len({t.dtype for t in tensors}) > 1:
        return run_replicated(func, args, kwargs)
    shape = [t.numel() for t in tensors]
    ones = [1] * len(shape)
    grids = [t.reshape([*ones[:i], shape[i], *ones[i + 1 :]]).expand(shape) for i, t in enumerate(tensors)]
    return tuple(g.transpose(0, 1) for g in grids) if indexing == "xy" and len(grids) > 1 else tuple(grids)


def cartesian_prod(func: Any, args: Any, kwargs: Any) -> Any:
    """Combine the elements of the tensors in every way, as the rows of a matrix."""
    tensors = _listed(args)
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([grid.flatten() for grid in meshgrid(torch.meshgrid, tensors, None)], 1)


def sum_to_size(func: Any, args: Any, kwargs: Any) -> Any:
    """Sum over the dims that ``size`` lacks or has as one: what broadcasting to the tensor's shape would undo."""
    x, *size = args
    wanted = list(size[0]) if size and isinstance(size[0], (list, tuple)) else size
    ahead = x.dim() - len(wanted)
    fits = ahead >= 0 and all(n in (1, own) for n, own in zip(wanted, x.shape[ahead:], strict=True))
    if kwargs or not fits:
        return run_replicated(func, args, kwargs)
    ones = [d + ahead for d, n in enumerate(wanted) if n == 1 != x.shape[d + ahead]]
    if ones:
        x = x.sum(ones, keepdim=True)
    return x.sum(list(range(ahead))) if ahead else x


def norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``linalg.norm(x, ord, dim, keepdim)`` and ``linalg.matrix_norm``: a norm of vectors, where it is one."""
    options = torch_keywords(kwargs or {})
    is_matrix = op_name(func).base == "linalg_matrix_norm"
    given = {**dict(zip(("A", "ord", "dim", "keepdim"), args, strict=False)), **options}
    x, order = given.get("A", given.get("input")), given.get("ord", "fro" if is_matrix else None)
    dims = given.get("dim", (-2, -1) if is_matrix else None)
    if not isinstance(x, DTensor) or options.get("out") is not None:
        return run_replicated(func, args, kwargs)
    rest = {"keepdim": bool(given.get("keepdim", False)), "dtype": options.get("dtype")}
    if order is None and not is_matrix:
        return torch.linalg.vector_norm(x, 2, dims, **rest)
    count = x.dim() if dims is None else 1 if isinstance(dims, int) else len(dims)
    if order == "fro" and count == 2:
        return torch.linalg.vector_norm(x, 2, dims, **rest)
    if isinstance(order, (int, float)) and count == 1 and not is_matrix:
        return torch.linalg.vector_norm(x, order, dims, **rest)
    return run_rule(func, args, kwargs)


def dist(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.dist(x, y, p)``: the norm of a difference."""
    given = {**dict(zip(("input", "other", "p"), args, strict=False)), **torch_keywords(kwargs or {})}
    order = given.get("p", 2)
    if not isinstance(order, (int, float)) or not 0 < order < math.inf:
        return run_replicated(func, args, kwargs)
    return torch.linalg.vector_norm(given["input"] - given["other"], order)


def with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """``narrow`` and ``tensor_split``, which take positions as tensors too: those are read, on every rank."""
    given = dict(kwargs or {})
    if "tensor_indices_or_sections" in given:
        args = (*args, given.pop("tensor_indices_or_sections"))

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return run_rule(func, (args[0], *map(plain, args[1:])), {name: plain(value) for name, value in given.items()})


def resized(func: Any, args: Any, kwargs: Any) -> Any:
    """``upsample_*(x, size, ..., scale_factors)``: with the size that follows from the factors, which are floats, so
    that a decision holds for one size.
    """
    if kwargs or not isinstance(args[-1], (list, tuple)) or len(args) < 3:
        return run_rule(func, args, kwargs)
    x, *options, factors = args
    told: Any = getattr(nn_operations, f"upsample_nearest{len(factors)}d")  # the same sizes, and soon
    with without_user_modes():
        size = list(told(torch.empty(x.shape, device="meta"), None, factors).shape[2:])
    return run_rule(func, (x, size, *options[1:], *factors), None)


def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.index_put(indices, values)``: an assignment to a copy. Sums (``accumulate``) are computed replicated."""
    return _assigned(func, args, kwargs, torch.clone)


def index_put_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.index_put_(indices, values)``: an assignment."""
    return _assigned(func, args, kwargs, lambda x: x)


def _assigned(func: Any, args: Any, kwargs: Any, target: Callable[[Any], Any]) -> Any:
    given = {**dict(zip(("input", "indices", "values", "accumulate"), args, strict=False)), **(kwargs or {})}
    x: Any = given.get("input")
    values: Any = given.get("values")
    keys: Any = given.get("indices")
    known = isinstance(x, DTensor) and isinstance(values, DTensor) and isinstance(keys, (list, tuple))
    if not known or given.get("accumulate", False) or x.dtype is not values.dtype or len(given) > 4:
        return run_replicated(func, args, kwargs)
    if not all(k is None or (isinstance(k, torch.Tensor) and k.dtype in _POSITIONS) for k in keys):
        return run_replicated(func, args, kwargs)
    written = target(x)
    written[tuple(slice(None) if k is None else k for k in keys)] = values
    return written


_POSITIONS = (torch.int64, torch.int32)


def kron(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.kron(x, y)``: every element of the one times all of the other, whose dims stand behind its own."""
    if kwargs or len(args) != 2 or not all(isinstance(t, DTensor) for t in args):
        return run_replicated(func, args, kwargs)
    ndim = max(t.dim() for t in args)
    x, y = (t.reshape([*[1] * (ndim - t.dim()), *t.shape]) for t in args)
    outer = x.reshape([n for size in x.shape for n in (size, 1)])
    inside = y.reshape([n for size in y.shape for n in (1, size)])
    return (outer * inside).reshape([a * b for a, b in zip(x.shape, y.shape, strict=True)])


def inner(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.inner(x, y)``: a product of numbers with all, else a product of matrices whose rows are the vectors."""
    if kwargs or len(args) != 2 or not all(isinstance(t, DTensor) for t in args):
        return run_replicated(func, args, kwargs)
    x, y = args
    if not x.dim() or not y.dim():
        return x * y
    if x.dim() == y.dim() == 1:
        return run_rule(func, args, kwargs)
    if x.shape[-1] != y.shape[-1] or 0 in (*x.shape, *y.shape):
        return run_replicated(func, args, kwargs)
    if y.dim() < 3:
        return torch.matmul(x, y.t())
    return torch.matmul(x, y.reshape(-1, y.shape[-1]).t()).reshape([*x.shape[:-1], *y.shape[:-1]])


def cosine_similarity(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the product of both over their lengths, which cut vectors have where they are."""
    given = {**dict(zip(("x1", "x2", "dim", "eps"), args, strict=False)), **(kwargs or {})}
    pair: list[Any] = [given.get("x1"), given.get("x2")]
    dim, eps = given.get("dim", 1), given.get("eps", 1e-8)
    alike = all(type(x) is DTensor and x.dim() == pair[0].dim() and x.dtype is pair[0].dtype for x in pair)
    if not alike or not -pair[0].dim() <= dim < pair[0].dim():
        return run_rule(func, args, kwargs)
    if not any(p.is_shard(dim % x.dim()) for x in pair for p in x.placements):
        return run_rule(func, args, kwargs)
    lengths = [torch.linalg.vector_norm(x, 2, dim, True).clone() for x in pair]
    with torch.no_grad():  # as torch does it: the gradient is that of the length, also where it is too small
        for length in lengths:
            length.clamp_min_(eps)
    return (pair[0] / lengths[0] * (pair[1] / lengths[1])).sum(dim)


def rms_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``rms_norm(x, shape, weight, eps)``: of a cut row the ranks send the sums of their squares, not the row."""
    given = {**dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)), **(kwargs or {})}
    x: Any = given.get("input")
    shape: Any = given.get("normalized_shape")
    weight, eps = given.get("weight"), given.get("eps")
    known = isinstance(x, DTensor) and x.dtype in (torch.float32, torch.float64) and isinstance(shape, (list, tuple))
    if not known or not (weight is None or (isinstance(weight, DTensor) and weight.dtype is x.dtype)):
        return run_rule(func, args, kwargs)
    dims = list(range(x.dim() - len(shape), x.dim()))
    fits = tuple(x.shape[x.dim() - len(shape) :]) == tuple(shape) and (weight is None or weight.shape == tuple(shape))
    if not fits or not any(p.is_shard(d) for p in x.placements for d in dims) or any(map(_is_partial, x.placements)):
        return run_rule(func, args, kwargs)
    result = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return (result if weight is None else result * weight).contiguous()  # as torch's is, in whatever order x lies


def _is_partial(placement: Any) -> bool:
    return bool(placement.is_partial())


def multi_dot(func: Any, args: Any, kwargs: Any) -> Any:
    """``linalg.multi_dot([x, y])`` is their product; the order of more is torch's to find, of gathered ones."""
    tensors = args[0] if len(args) == 1 else ()
    if kwargs or len(tensors) != 2 or not all(isinstance(t, DTensor) and t.dim() in (1, 2) for t in tensors):
        return run_replicated(func, args, kwargs)
    return torch.matmul(*tensors)
