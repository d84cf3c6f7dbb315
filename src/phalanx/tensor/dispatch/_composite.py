"""Functions on DTensors that are written as other functions on DTensors, where no single local call would do.

Owns the mean of cross entropy (a sum over a count), norms over sharded dims (a norm of norms), attention with dropout,
and refusals of random recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from phalanx._torch_private import nn_operations
from phalanx.tensor.core._copied_views import checked_local
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.dispatch._distribute import redistribute_input
from phalanx.tensor.dispatch._fallback import run_replicated
from phalanx.tensor.dispatch._inline_python import inlined, run_inlined
from phalanx.tensor.dispatch._run import run_first, run_first_two, run_mixed, run_rule
from phalanx.tensor.layout._placement import REPLICATE, Placement, Shard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import OPERATORS, op_name
from phalanx.tensor.ops._rule import torch_keywords

_NONE, _MEAN, _SUM = 0, 1, 2  # how torch numbers reductions
_HALF = (torch.float16, torch.bfloat16)


def cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """``cross_entropy_loss(input, target, weight, reduction, ignore_index, label_smoothing)``, which
    F.cross_entropy calls.

    The mean is a sum divided by the weight of the targets that count, each over all shards.
    """
    return _class_loss(func, args, kwargs, [None, _MEAN, -100, 0.0])


def nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """``nll_loss_nd(input, target, weight, reduction, ignore_index)``, which F.nll_loss calls."""
    return _class_loss(func, args, kwargs, [None, _MEAN, -100])


def _class_loss(func: Any, args: tuple[Any, ...], kwargs: Any, defaults: list[Any]) -> Any:
    first, target, weight, reduction, ignored, *rest = args if len(args) > 4 else (*args, *defaults[len(args) - 2 :])
    if kwargs or not isinstance(first, DTensor) or not isinstance(target, DTensor) or len(first._spec.shape) < 2:
        return run_replicated(func, args, kwargs)
    if reduction != _MEAN:
        return run_rule(func, (first, target, weight, reduction, ignored, *rest), None)
    if first.dtype in _HALF:  # a sum may be too large for them
        each = run_rule(func, (first, target, weight, _NONE, ignored, *rest), None)
        return (each.sum(dtype=torch.float32) / _counted(first, target, weight, ignored)).to(each.dtype)
    total = run_rule(func, (first, target, weight, _SUM, ignored, *rest), None)
    return total / _counted(first, target, weight, ignored)


def _counted(first: DTensor, target: DTensor, weight: Any, ignored: int) -> Any:
    """Say what the mean of a loss is divided by: the rows that count, or their weights."""
    if target.is_floating_point():
        return first.numel() // first.shape[1]
    counted = target != ignored
    if weight is None:
        return counted.sum()
    safe = torch.where(counted, target, torch.zeros_like(target))
    weights = F.embedding(safe, weight.unsqueeze(1)).squeeze(-1) * counted
    return weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))


_REDUCTIONS = {"none": _NONE, "mean": _MEAN, "sum": _SUM}
_LOSS: Any = nn_operations.cross_entropy_loss
_cross_entropy_body: Any = inlined(F.cross_entropy)


def functional_cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.cross_entropy`` without its Python body, which only renames the reduction."""
    try:
        first, target = args
        old_names = kwargs["size_average"] is not None or kwargs["reduce"] is not None
        reduction, smoothing = _REDUCTIONS[kwargs["reduction"]], kwargs["label_smoothing"]
        values = (first, target, kwargs["weight"], reduction, kwargs["ignore_index"])
    except (KeyError, ValueError):  # torch's body hands it over otherwise, or a reduction that is none
        return run_inlined(_cross_entropy_body, func, args, kwargs)
    if old_names:
        return run_inlined(_cross_entropy_body, func, args, kwargs)
    return _class_loss(_LOSS, (*values, smoothing) if smoothing else values, None, [])


def elementwise_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Element by element where the elements are; then their mean or sum, which is a reduction like any other."""
    place, options = OPERATORS[op_name(func).base].reduction_at, dict(kwargs or {})
    if len(args) > place:
        reduction = args[place]
        args = (*args[:place], _NONE, *args[place + 1 :])
    else:
        reduction = options.get("reduction", _MEAN)
        options["reduction"] = _NONE
    each = run_rule(func, args, options)
    return _reduced(each, reduction)


def _reduced(each: Any, reduction: int) -> Any:
    return each if reduction == _NONE else each.mean() if reduction == _MEAN else each.sum()


def pairwise_distance(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the norm of the difference, which partial tensors and cut vectors have where they are."""
    given = {**dict(zip(("x1", "x2", "p", "eps", "keepdim"), args, strict=False)), **(kwargs or {})}
    pair: list[Any] = [given.get("x1"), given.get("x2")]
    order = given.get("p", 2.0)
    if not all(type(x) is DTensor and x.ndim for x in pair) or not 0 < order < math.inf:
        return run_rule(func, args, kwargs)
    if not (_have_cut_vectors(pair) or any(p.is_partial() for x in pair for p in x.placements)):
        return run_rule(func, args, kwargs)
    difference = pair[0] - pair[1] + given.get("eps", 1e-6)
    return torch.linalg.vector_norm(difference, order, -1, bool(given.get("keepdim", False)))


def _have_cut_vectors(tensors: list[Any]) -> bool:
    """Return whether the last dim of one of them is cut."""
    return any(p.is_shard(x.ndim - 1) for x in tensors for p in x.placements)


_TRIPLET_NAMES = ("anchor", "positive", "negative", "margin", "p", "eps", "swap", "reduction")


def triplet_margin_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the loss made of distances, where vectors are cut; else element by element."""
    given = {**dict(zip(_TRIPLET_NAMES, args, strict=False)), **(kwargs or {})}
    tensors: list[Any] = [given.get(name) for name in _TRIPLET_NAMES[:3]]
    anchor, positive, negative = tensors
    same = all(type(x) is DTensor and x.ndim and x.shape == anchor.shape for x in tensors)
    if not same or not _have_cut_vectors(tensors):
        return elementwise_loss(func, args, kwargs)
    how = (given.get("p", 2.0), given.get("eps", 1e-6))
    near, far = F.pairwise_distance(anchor, positive, *how), F.pairwise_distance(anchor, negative, *how)
    if given.get("swap", False):
        far = torch.minimum(far, F.pairwise_distance(positive, negative, *how))
    each = torch.clamp_min(given.get("margin", 1.0) + near - far, 0)
    return _reduced(each, given.get("reduction", _MEAN))


def broadcast_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Return each expanded where it is; losses begin with this."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if not all(type(t) is DTensor for t in tensors):
        return run_replicated(func, args, kwargs)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t if t.shape == shape else t.expand(shape) for t in tensors)


def vector_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the norm of the ranks' norms, over the axes that shard a reduced dim."""
    options = torch_keywords(kwargs or {})
    x = args[0]
    names = ("x", "ord", "dim", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **options}
    order = given.get("ord", 2)
    if order in (math.inf, -math.inf) and _is_plain_extreme(x, options):
        values = x.abs() if options.get("dtype") is None else x.to(options["dtype"]).abs()
        pick, dims = torch.amax if order > 0 else torch.amin, given.get("dim")
        return pick(values, () if dims is None else dims, bool(given.get("keepdim", False)))
    if not isinstance(x, DTensor) or options.get("out") is not None or not (0 < order < math.inf) or not x.ndim:
        return run_replicated(func, args, kwargs)
    x = _without_partial(x, func.__name__)
    spec = x._spec
    dims = given.get("dim")
    chosen = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else list(dims) or range(x.ndim)
    reduced = {d % x.ndim for d in chosen}
    keepdim = bool(given.get("keepdim", False))
    local = func(checked_local(x), order, sorted(reduced), keepdim, dtype=options.get("dtype"))
    placements: list[Placement] = []
    count, shape = 1, []
    for axis, p in enumerate(spec.placements):
        if not isinstance(p, Shard):
            placements.append(REPLICATE)
        elif p.dim in reduced:
            placements.append(Shard(0))
            count *= spec.mesh.shape[axis]
        else:
            onto = p.dim if keepdim else p.dim - sum(d < p.dim for d in reduced)
            placements.append(p.on_dim(onto + 1))
    for d, n in enumerate(x.shape):
        shape += [n] if d not in reduced else [1] if keepdim else []
    gathered = [REPLICATE if isinstance(p, Shard) and p.dim == 0 else p for p in placements]
    outer = [p.on_dim(p.dim - 1) if isinstance(p, Shard) else p for p in gathered]
    result = Spec.of(spec.mesh, outer, shape, local.dtype)
    if count == 1:  # no axis cuts a reduced dim, or only axes of one rank
        return wrap(local, result)
    stacked = Spec.of(spec.mesh, placements, (count, *shape), local.dtype)
    norms = redistribute_input(wrap(local.unsqueeze(0), stacked), stacked.with_placements(gathered), func.__name__)
    return wrap(func(norms, order, 0), result)


def _is_plain_extreme(x: Any, options: Any) -> bool:
    """Return whether a largest absolute value may be taken as one: gradients are spread over equals in another way."""
    graded = torch.is_grad_enabled() and isinstance(x, DTensor) and x.requires_grad
    return isinstance(x, DTensor) and bool(x.ndim and x.numel()) and not graded and options.get("out") is None


def _without_partial(x: DTensor, op: str) -> DTensor:
    spec = x._spec.cotangent
    return x if spec is x._spec else wrap(redistribute_input(x, spec, op), spec)


def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn)``.

    Statistics of a batch whose batch or space is sharded are sums over the ranks: two small reductions, where gathering
    would move the batch. Everything else is the rule's.
    """
    x, weight, bias, running_mean, running_var, training, momentum, eps = args[:8]
    given = [t for t in args[:5] if isinstance(t, torch.Tensor)]
    if (
        kwargs
        or not training
        or x.ndim < 2
        or not all(isinstance(t, DTensor) and t.dtype in (torch.float32, torch.float64) for t in given)
        or not any(isinstance(p, Shard) and p.dim != 1 for p in x.placements)
        or x.numel() <= x.shape[1]
    ):
        return run_rule(func, args, kwargs)
    dims = [d for d in range(x.ndim) if d != 1]
    count = x.numel() // x.shape[1]
    across = [1, -1, *[1] * (x.ndim - 2)]
    mean = _without_partial(x.mean(dims, keepdim=True), "batch_norm")
    centred = x - mean
    var = _without_partial((centred * centred).mean(dims, keepdim=True), "batch_norm")
    with torch.no_grad():
        for running, batch in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(batch.detach().reshape(-1), alpha=momentum)
    result = centred * torch.rsqrt(var + eps)
    if weight is not None:
        result = result * weight.reshape(across)
    result = result if bias is None else result + bias.reshape(across)
    kept = any(x.is_contiguous(memory_format=form) for form in _KEPT_FORMATS.get(x.ndim, ()))
    return result if kept else result.contiguous()


# Memory formats that torch's batch_norm keeps, by the number of dims; of anything else it makes a row-major tensor.
_KEPT_FORMATS = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}


_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention(func: Any, args: Any, kwargs: Any) -> Any:
    """With dropout: written out, so that the dropped elements are those of the global tensor."""
    given = {**dict(zip(_SDPA_NAMES, args, strict=False)), **(kwargs or {})}
    if not given.get("dropout_p"):
        return run_rule(func, args, kwargs)
    if given.get("enable_gqa"):
        raise NotImplementedError("scaled_dot_product_attention with dropout and enable_gqa on a DTensor")
    query, key, value = given["query"], given["key"], given["value"]
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(-2, -1)) * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), given["dropout_p"]) @ value


def recurrent(func: Any, args: Any, kwargs: Any) -> Any:
    """lstm, gru, rnn: computed replicated; their dropout would draw other numbers on each rank."""
    numbers = [a for a in args if isinstance(a, (bool, int, float)) and not isinstance(a, torch.Tensor)]
    floats = [a for a in numbers if isinstance(a, float)]
    flags = [a for a in numbers if isinstance(a, bool)]
    if floats and floats[0] > 0 and len(flags) > 1 and flags[1]:
        raise NotImplementedError(f"{func.__name__} with dropout on a DTensor: put nn.Dropout between the layers")
    return run_replicated(func, args, kwargs)


_EMBEDDING_NAMES = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def embedding(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.embedding(indices, weight)`` without its Python body; ``torch.embedding`` has the rule."""
    given = kwargs or {}
    if len(args) != 2 or len(given) != 5:  # torch's body hands it over otherwise
        named = dict(zip(_EMBEDDING_NAMES, args, strict=False))
        given = {**dict.fromkeys(_EMBEDDING_NAMES), **named, **given}
        args = (given["input"], given["weight"])
    indices, weight = args
    if given["max_norm"] is not None:
        raise NotImplementedError(
            "embedding(max_norm=) on a DTensor changes rows that other ranks may hold: renorm the weight"
        )
    padding = given["padding_idx"]
    if padding is None:
        padding = -1
    elif -weight.shape[0] <= padding < weight.shape[0]:
        padding %= weight.shape[0]
    else:
        raise ValueError(f"embedding(padding_idx={padding}): the weight has {weight.shape[0]} rows")
    if given["scale_grad_by_freq"] or given["sparse"]:
        return torch.embedding(weight, indices, padding, bool(given["scale_grad_by_freq"]), bool(given["sparse"]))
    if type(weight) is DTensor and type(indices) is DTensor:
        return run_first_two(torch.embedding, weight, indices, (padding,))
    return run_rule(torch.embedding, (weight, indices, padding), None)


def dense_gradient(position: int) -> Callable[[Any, Any, Any], Any]:
    """``torch.embedding`` and ``torch.embedding_bag``, whose argument at ``position`` asks for a sparse gradient."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        sparse = args[position] if len(args) > position else (kwargs or {}).get("sparse")
        weight = args[0] if args else kwargs["weight"]
        if sparse and torch.is_grad_enabled() and weight.requires_grad:
            raise NotImplementedError(
                f"{func.__name__}(sparse=True) on a DTensor: its gradient is dense. Pass sparse=False, "
                f"and use an optimizer for dense gradients (not SparseAdam)"
            )
        return run_rule(func, args, kwargs)

    return handler


dense_embedding = dense_gradient(4)
dense_embedding_bag = dense_gradient(5)


def layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.layer_norm`` gives weight and bias as keywords; by position they take the quick way."""
    if kwargs and len(args) == 2 and len(kwargs) == 3:  # as torch's body hands it over
        return run_mixed(torch.layer_norm, (*args, kwargs["weight"], kwargs["bias"], kwargs["eps"]))
    given = {**_NORM_DEFAULTS, **dict(zip(_NORM_DEFAULTS, args, strict=False)), **(kwargs or {})}
    return run_rule(torch.layer_norm, tuple(given.values()), None)


def softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.softmax(x, dim)`` and ``F.log_softmax(x, dim)`` are methods of tensors if they say the dim."""
    given = kwargs or {}
    dim = args[1] if len(args) > 1 else given.get("dim")
    if dim is None or len(args) > 2 or given.get("dtype") is not None:
        return run_rule(func, args, kwargs)
    method = getattr(torch.Tensor, func.__name__)
    if type(dim) is int and type(args[0]) is DTensor:
        return run_first(method, args[0], (dim,))
    return run_rule(method, (args[0], dim), None)


_NORM_DEFAULTS = {"input": None, "normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5}


def setitem(func: Any, args: Any, kwargs: Any) -> None:
    """``x[mask] = number`` is ``masked_fill_``, which needs no index."""
    x, key, value = args
    if (
        type(key) is DTensor
        and key.dtype is torch.bool
        and type(x) is DTensor
        and x.shape[: key.ndim] == key.shape
        and (isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and not value.dim()))
    ):
        x.masked_fill_(key.reshape([*key.shape, *[1] * (x.ndim - key.ndim)]), value)
    else:
        run_rule(func, args, kwargs)


def activation(func: Any, args: Any, kwargs: Any) -> Any:
    """``F.relu(x, inplace=False)`` and the like; in place they are other functions."""
    if kwargs and "inplace" in kwargs:
        kwargs = dict(kwargs)
        in_place = kwargs.pop("inplace")
    else:
        in_place = args[-1] is True  # their other arguments are numbers
    if in_place:
        given = args[:-1] if args[-1] is True else args
        return run_inlined(_body_of(func), func, given, {**(kwargs or {}), "inplace": True})
    return run_rule(func, args, kwargs)


_body_of = cache(inlined)  # of an activation, which knows how to work in place
