"""Random functions on DTensors: each draws one stream and gives every element its own value from it.

Owns their handlers. What is not here and draws numbers is refused (``REFUSED``): computed replicated it would use
torch's generators, whose values differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.tensor import _noise
from phalanx.tensor._dtensor import DTensor, wrap
from phalanx.tensor._execute import redistribute_local
from phalanx.tensor._fallback import write_out
from phalanx.tensor._order import kept_order
from phalanx.tensor._random import next_stream
from phalanx.tensor._spec import Spec
from phalanx.tensor._surprise import moved_for
from phalanx.tensor._views import check_writable, fresh, written

REFUSED = frozenset(
    [
        "poisson",
        "binomial",
        "_sample_dirichlet",
        "_standard_gamma",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
        "svd_lowrank",
        "pca_lowrank",
        "lobpcg",
    ]
)


def _check_generator(kwargs: dict[str, Any]) -> None:
    if kwargs.pop("generator", None) is not None:
        raise NotImplementedError("generator= on a DTensor: use phalanx.tensor.manual_seed(seed, mesh)")


def uniform_like(tensor: DTensor) -> Tensor:
    """A local tensor of uniform values, whole where ``tensor`` is partial."""
    spec = tensor._spec.cotangent
    like = (
        tensor._local if tensor.dtype.is_floating_point else tensor._local.new_empty((), dtype=torch.float32)
    )
    return _noise.uniform_tensor(spec, next_stream(spec.mesh), like.detach())


def normal_like(tensor: DTensor) -> Tensor:
    spec = tensor._spec.cotangent
    bits = _noise.element_bits(spec, next_stream(spec.mesh))
    return _noise.to_tensor(_noise.normal(bits), tensor._local.detach(), spec.local_shape)


def _write(tensor: DTensor, values: Tensor, op: str) -> DTensor:
    if tensor._stale is not None:
        check_writable(tensor, op)
    spec = tensor._spec
    tensor._local.copy_(redistribute_local(values, spec.cotangent, spec))
    written(tensor)
    return tensor


def _like(make: Callable[[DTensor], Tensor]) -> Callable[[Any, Any, Any], Any]:
    """rand_like, randn_like: of the layout of the argument, with a dtype maybe."""

    def handler(func: Any, args: Any, kwargs: Any) -> DTensor:
        options = dict(kwargs or {})
        _check_generator(options)
        tensor = args[0]
        dtype = options.get("dtype") or tensor.dtype
        template = wrap(tensor._local.detach().to(dtype), tensor._spec)
        made = _in_memory(make(template), tensor, options)
        return wrap(made.requires_grad_(bool(options.get("requires_grad"))), tensor._spec.cotangent)

    return handler


def _randint_like(func: Any, args: Any, kwargs: Any) -> DTensor:
    options = dict(kwargs or {})
    tensor = args[0]
    bounds = [*args[1:], *(options[k] for k in ("low", "high") if k in options)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    spec = tensor._spec.cotangent
    values = _noise.integers(_noise.element_bits(spec, next_stream(spec.mesh)), int(low), int(high))
    like = tensor._local.detach().to(options.get("dtype") or tensor.dtype)
    return wrap(_in_memory(_noise.to_tensor(values, like, spec.local_shape), tensor, options), spec)


def _in_memory(values: Tensor, tensor: DTensor, options: dict[str, Any]) -> Tensor:
    """In the order of ``tensor``, if no other is asked for."""
    form = options.get("memory_format") or torch.preserve_format
    if form is torch.preserve_format:
        return kept_order(values, tensor._spec.cotangent, tensor)
    return values.contiguous(memory_format=form)


def _option(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else (kwargs or {}).get(name, default)


def _fill(make: Callable[[DTensor, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """In-place fillers: uniform_, normal_, exponential_..."""

    def handler(func: Any, args: Any, kwargs: Any) -> DTensor:
        options = dict(kwargs or {})
        _check_generator(options)
        return _write(args[0], make(args[0], args, options), func.__name__)

    return handler


def _require(good: bool, told: str) -> None:
    """Raise as torch does for parameters of which there is no distribution."""
    if not good:
        raise RuntimeError(told)


def _uniform(t: DTensor, args: Any, kw: Any) -> Any:
    low, high = _option(args, kw, 1, "from", 0.0), _option(args, kw, 2, "to", 1.0)
    _require(low <= high, f"uniform_ on a DTensor needs from <= to, got from={low}, to={high}")
    return uniform_like(t) * (high - low) + low


def _normal(t: DTensor, args: Any, kw: Any) -> Any:
    std = _option(args, kw, 2, "std", 1.0)
    _require(std >= 0, f"normal_ on a DTensor needs std >= 0, got {std}")
    return normal_like(t) * std + _option(args, kw, 1, "mean", 0.0)


def _log_normal(t: DTensor, args: Any, kw: Any) -> Any:
    std = _option(args, kw, 2, "std", 2.0)
    _require(std > 0, f"log_normal_ on a DTensor needs std > 0, got {std}")
    return (normal_like(t) * std + _option(args, kw, 1, "mean", 1.0)).exp()


def _exponential(t: DTensor, args: Any, kw: Any) -> Any:
    rate = _option(args, kw, 1, "lambd", 1.0)
    _require(rate > 0, f"exponential_ on a DTensor needs lambd > 0, got {rate}")
    return -torch.log1p(-uniform_like(t)) / rate


def _cauchy(t: DTensor, args: Any, kw: Any) -> Any:
    sigma = _option(args, kw, 2, "sigma", 1.0)
    _require(sigma > 0, f"cauchy_ on a DTensor needs sigma > 0, got {sigma}")
    centred = torch.tan(torch.pi * (uniform_like(t) - 0.5))
    return centred * sigma + _option(args, kw, 1, "median", 0.0)


def _geometric(t: DTensor, args: Any, kw: Any) -> Tensor:
    p = float(_option(args, kw, 1, "p", 0.5))
    _require(0 < p < 1, f"geometric_ on a DTensor needs p between 0 and 1, got {p}")
    draws = torch.ceil(torch.log1p(-uniform_like(t)) / np.log1p(-p)).clamp_min(1)
    return draws.to(t.dtype)


def _random(t: DTensor, args: Any, kw: Any) -> Tensor:
    bounds = [*args[1:], *(kw[k] for k in ("from", "to") if kw.get(k) is not None)]
    if len(bounds) == 2:
        low, high = bounds
    else:
        top = 2**24 if t.dtype == torch.float32 else 2**11 if t.dtype == torch.float16 else 2**53
        if not t.dtype.is_floating_point:
            top = min(torch.iinfo(t.dtype).max, 2**62) if t.dtype is not torch.bool else 1
        low, high = 0, bounds[0] if bounds else top + 1
    spec = t._spec.cotangent
    values = _noise.integers(_noise.element_bits(spec, next_stream(spec.mesh)), int(low), int(high))
    return _noise.to_tensor(values, t._local.detach(), spec.local_shape)


def _bernoulli(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``bernoulli(probabilities)``, ``bernoulli(x, p)``, ``x.bernoulli_(p)`` with a number or a DTensor."""
    options = dict(kwargs or {})
    _check_generator(options)
    tensor: DTensor = args[0]
    in_place = func.__name__.endswith("_")
    p = _option(args, options, 1, "p", 0.5 if in_place else None)
    draw = uniform_like(tensor)
    if p is None:
        chance = moved_for("bernoulli", fresh(tensor).detach(), tensor._spec, tensor._spec.cotangent)
    elif isinstance(p, DTensor):
        target = tensor._spec.cotangent.with_dtype(p.dtype)
        whole = p.detach().expand(tensor.shape)
        chance = moved_for("bernoulli", whole._local, whole._spec, target)  # type: ignore[attr-defined]  # a DTensor
    else:
        chance = p
    values = (draw < chance).to(tensor.dtype)
    return _write(tensor, values, func.__name__) if in_place else wrap(values, tensor._spec.cotangent)


def _mask(tensor: DTensor, keep: float, feature: bool = False) -> DTensor:
    """One with probability ``keep``, else zero; per element, or per channel (the first two dims)."""
    if not feature:
        return wrap((uniform_like(tensor) < keep).to(tensor.dtype), tensor._spec.cotangent)
    shape = [*tensor.shape[:2], *[1] * (tensor.ndim - 2)]
    spec = Spec.of(tensor._spec.mesh, tensor._spec.replicated.placements, shape, tensor.dtype)
    draw = _noise.uniform_tensor(spec, next_stream(spec.mesh), tensor._local.detach().real)
    return wrap((draw < keep).to(tensor.dtype), spec)


def _dropout(feature: bool) -> Callable[[Any, Any, Any], Any]:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        p, train = _option(args, kwargs, 1, "p", 0.5), _option(args, kwargs, 2, "train", True)
        in_place = func.__name__.endswith("_")
        if not train or p == 0:
            return tensor if in_place else tensor.clone() if func.__name__ == "native_dropout" else tensor * 1
        if not 0 <= p <= 1:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        mask = _mask(tensor, 1 - p, feature)
        scaled = mask / (1 - p) if p < 1 else mask
        if func.__name__ == "native_dropout":
            return tensor * scaled, mask.bool()
        return tensor.mul_(scaled) if in_place else tensor * scaled

    return handler


def _alpha_dropout(feature: bool) -> Callable[[Any, Any, Any], Any]:
    alpha = 1.7580993408473766  # selu's alpha times its scale: the value of saturated units

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        p, train = _option(args, kwargs, 1, "p", 0.5), _option(args, kwargs, 2, "train", False)
        in_place = func.__name__.endswith("_")
        if not train or p == 0:
            return tensor if in_place else tensor * 1
        if p == 1:
            return tensor.mul_(0) if in_place else tensor * 0
        mask = _mask(tensor, 1 - p, feature)
        a = 1.0 / float(np.sqrt((alpha * alpha * p + 1) * (1 - p)))
        shift = (mask - 1) * (alpha * a) + alpha * a * p
        return tensor.mul_(mask * a).add_(shift) if in_place else tensor * (mask * a) + shift

    return handler


def _rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    noise = 1 if func.__name__.startswith("rrelu_with_noise") else 0
    if noise:
        raise NotImplementedError("rrelu_with_noise on a DTensor: use rrelu")
    low, high = _option(args, kwargs, 1, "lower", 1 / 8), _option(args, kwargs, 2, "upper", 1 / 3)
    _require(low <= high, f"rrelu on a DTensor needs lower <= upper, got lower={low}, upper={high}")
    slope: Any = (low + high) / 2
    if _option(args, kwargs, 3, "training", False):
        slope = wrap(uniform_like(tensor) * (high - low) + low, tensor._spec.cotangent)
    result = torch.where(tensor >= 0, tensor, tensor * slope)
    return tensor.copy_(result) if func.__name__.endswith("_") else result


def _normal_from(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.normal(mean, std)`` where at least one is a DTensor."""
    options = dict(kwargs or {})
    _check_generator(options)
    out = options.pop("out", None)
    mean, std = _option(args, options, 0, "mean", 0.0), _option(args, options, 1, "std", 1.0)
    if isinstance(std, (int, float)):
        _require(std >= 0, f"normal on a DTensor needs std >= 0, got {std}")
    shape = (mean + std).detach()
    made = wrap(normal_like(shape), shape._spec.cotangent) * std + mean
    return made if out is None else out.copy_(made)


def _multinomial(func: Any, args: Any, kwargs: Any) -> DTensor:
    """By ranking exponential clocks (without replacement) or inverting the distribution (with)."""
    options = dict(kwargs or {})
    _check_generator(options)
    weights: DTensor = args[0].detach()
    count = _option(args, options, 1, "num_samples", 1)
    whole = moved_for("multinomial", weights._local, weights._spec, weights._spec.replicated)
    replicated = wrap(whole, weights._spec.replicated)
    mesh = weights._spec.mesh
    _require(0 < weights.ndim < 3, f"multinomial on a DTensor needs 1 or 2 dims, got {tuple(weights.shape)}")
    _require(weights.is_floating_point(), f"multinomial on a DTensor needs floats, got {weights.dtype}")
    _require(count > 0, f"multinomial on a DTensor needs num_samples > 0, got {count}")
    _require(
        bool(((whole >= 0) & whole.isfinite()).all() & (whole.sum(-1) > 0).all()),
        "multinomial on a DTensor needs weights that are finite, not negative, and not all zero",
    )
    if not _option(args, options, 2, "replacement", False):
        if bool(((whole > 0).sum(-1) < count).any()):
            raise RuntimeError(
                "multinomial on a DTensor, without replacement: fewer non-zero weights than samples"
            )
        clocks = -torch.log1p(-uniform_like(replicated)) / whole
        chosen = clocks.argsort(-1)[..., :count].contiguous()
    else:
        shape = (*whole.shape[:-1], count)
        spec = Spec.of(mesh, replicated.placements, shape, weights.dtype)
        draw = _noise.uniform_tensor(spec, next_stream(mesh), whole)
        totals = whole.cumsum(-1)
        chosen = torch.searchsorted(totals / totals[..., -1:], draw, right=True).clamp_max(
            whole.shape[-1] - 1
        )
    return wrap(chosen, Spec.of(mesh, replicated.placements, chosen.shape, chosen.dtype))


def _with_out(handler: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        options = dict(kwargs or {})
        out = options.pop("out", None)
        result = handler(func, args, options)
        return result if out is None else write_out(result, out)

    return run


RANDOM: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rand_like": _like(uniform_like),
    "randn_like": _like(normal_like),
    "randint_like": _randint_like,
    "uniform": _fill(_uniform),
    "log_normal": _fill(_log_normal),
    "exponential": _fill(_exponential),
    "cauchy": _fill(_cauchy),
    "geometric": _fill(_geometric),
    "random": _fill(_random),
    "bernoulli": _with_out(_bernoulli),
    "dropout": _dropout(feature=False),
    "native_dropout": _dropout(feature=False),
    "feature_dropout": _dropout(feature=True),
    "alpha_dropout": _alpha_dropout(feature=False),
    "feature_alpha_dropout": _alpha_dropout(feature=True),
    "rrelu": _rrelu,
    "rrelu_with_noise": _rrelu,
    "multinomial": _with_out(_multinomial),
}


def random_handler(func: Any, base: str) -> Callable[[Any, Any, Any], Any] | None:
    if base == "normal":
        return _fill(_normal) if func is torch.Tensor.normal_ else _normal_from
    return RANDOM.get(base)
