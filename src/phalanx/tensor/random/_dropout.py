"""Dropout of every kind, and rrelu, on DTensors: masks by element, applied by operations that autograd follows.

Owns their handlers. Whether an element is kept is decided by its word alone, so a mask is the same in every dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.random import _philox
from phalanx.tensor.random._drawing import COMPLEX, FLOATS, Handler, drawn, option, require, require_dtype
from phalanx.tensor.random._traced_draws import draw_like

_SELU_SATURATION = 1.7580993408473766  # selu's alpha times its scale: minus the value of saturated units


def _mask(tensor: DTensor, keep: float, feature: bool, scaled: bool = False) -> DTensor:
    """Return one (``scaled``: divided by ``keep``) with probability ``keep``, else zero; per element or channel (two
    dims)."""
    spec = tensor._spec.cotangent
    if feature:
        require(tensor.ndim >= 2, f"feature dropout on a DTensor needs 2 or more dims, got {tuple(tensor.shape)}")
        shape = [*tensor.shape[:2], *[1] * (tensor.ndim - 2)]
        spec = Spec.of(spec.mesh, tensor._spec.replicated.placements, shape, tensor.dtype)
    kept = draw_like(tensor, spec.with_dtype(torch.bool), lambda bits: _philox.is_below(bits, keep))
    made = kept.to(tensor.dtype)
    return wrap(made.div_(keep) if scaled and keep else made, spec)


def _check(func: Any, tensor: DTensor, p: float) -> None:
    require(0 <= p <= 1, f"{func.__name__} on a DTensor needs a probability between 0 and 1, got {p}")


def _dropout(feature: bool) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        tensor: DTensor = args[0]
        p, train = option(args, kwargs, 1, "p", 0.5), option(args, kwargs, 2, "train", True)
        _check(func, tensor, p)
        if not train or p == 0 or tensor.numel() == 0:
            return tensor
        require_dtype(func.__name__, tensor.dtype, FLOATS | COMPLEX)
        scaled = _mask(tensor, 1 - p, feature, scaled=True)
        return tensor.mul_(scaled) if func.__name__.endswith("_") else tensor * scaled

    return handler


dropout, feature_dropout = _dropout(feature=False), _dropout(feature=True)


def native_dropout(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the result and the mask; ``train=None`` is taken as true, as torch does."""
    tensor: DTensor = args[0]
    p, train = option(args, kwargs, 1, "p", 0.5), option(args, kwargs, 2, "train", True)
    if train is False or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    _check(func, tensor, p)
    require_dtype(func.__name__, tensor.dtype, FLOATS | COMPLEX)
    mask = _mask(tensor, 1 - p, feature=False)
    return tensor * (mask / (1 - p) if p < 1 else mask), mask.bool()


def _alpha_dropout(feature: bool) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        tensor: DTensor = args[0]
        p, train = option(args, kwargs, 1, "p", 0.5), option(args, kwargs, 2, "train", False)
        in_place = func.__name__.endswith("_")
        _check(func, tensor, p)
        if not train or p == 0:
            return tensor
        require_dtype(func.__name__, tensor.dtype, FLOATS | COMPLEX)
        if p == 1:
            return tensor.mul_(0) if in_place else tensor * 0
        mask = _mask(tensor, 1 - p, feature)
        alpha = _SELU_SATURATION
        a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        shift = (mask - 1) * (alpha * a) + alpha * a * p
        return tensor.mul_(mask * a).add_(shift) if in_place else tensor * (mask * a) + shift

    return handler


alpha_dropout, feature_alpha_dropout = _alpha_dropout(feature=False), _alpha_dropout(feature=True)


def rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    tensor: DTensor = args[0]
    if func.__name__.startswith("rrelu_with_noise"):
        raise NotImplementedError("rrelu_with_noise on a DTensor: use rrelu")
    low, high = option(args, kwargs, 1, "lower", 1 / 8), option(args, kwargs, 2, "upper", 1 / 3)
    told = f"rrelu on a DTensor needs finite lower <= upper, got lower={low}, upper={high}"
    require(-math.inf < low <= high < math.inf, told)
    require_dtype("rrelu", tensor.dtype, FLOATS)
    slope: Any = (low + high) / 2
    if option(args, kwargs, 3, "training", False):
        made = drawn(tensor, lambda bits: _philox.uniform(bits) * (high - low) + low)
        slope = wrap(made, tensor._spec.cotangent)
    result = torch.where(tensor >= 0, tensor, tensor * slope)
    return tensor.copy_(result) if func.__name__.endswith("_") else result
