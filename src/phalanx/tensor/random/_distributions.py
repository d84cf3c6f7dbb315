"""Distributions: which parameters they take, and their values as functions of random words.

Owns the checks and the values of rand, randn, randint_like and the fillers (``uniform_``, ``exponential_``, ...). Pure.
All is computed in float64 and rounded to the dtype last, so that narrow dtypes decide and transform as wide ones do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phalanx.tensor.random import _philox
from phalanx.tensor.random._drawing import COMPLEX, FLOATS, INTEGERS, option, require, require_dtype
from phalanx.tensor.random._philox import Make


@dataclass(frozen=True)
class Distribution:
    """``make(dtype, *parameters)`` checks the parameters and gives the values."""

    name: str
    make: Callable[..., Make]
    takes: frozenset[torch.dtype]
    parameters: tuple[tuple[str, float], ...] = ()  # names and defaults

    def standard(self, dtype: torch.dtype, name: str) -> Make:
        """Its values with the default parameters, for the function ``name``."""
        require_dtype(name, dtype, self.takes)
        return self.of(dtype)

    def of(self, dtype: torch.dtype, args: Any = (), kwargs: Any = None) -> Make:
        """Its values with the parameters that follow the tensor in ``args``."""
        require_dtype(self.name, dtype, self.takes)
        given = (option(args, kwargs, i + 1, *named) for i, named in enumerate(self.parameters))
        return self.make(dtype, *(float(value) for value in given))


def _uniform(dtype: torch.dtype, low: float, high: float) -> Make:
    most = torch.finfo(dtype).max
    told = f"uniform_ on a DTensor of {dtype} needs finite from <= to, got from={low}, to={high}"
    require(-most <= low <= high <= most and high - low <= most, told)
    return lambda bits: _philox.cut_uniform(bits, dtype) * (high - low) + low


def _normal(dtype: torch.dtype, mean: float, std: float) -> Make:
    require(std >= 0, f"normal_ on a DTensor needs std >= 0, got {std}")
    if not dtype.is_complex:
        return lambda bits: _philox.normal(bits) * std + mean
    centre, spread = np.array([mean, 0.0]), std * math.sqrt(0.5)  # the two parts share the variance
    return lambda bits: _philox.normal(bits) * spread + centre


def _log_normal(dtype: torch.dtype, mean: float, std: float) -> Make:
    require(std > 0, f"log_normal_ on a DTensor needs std > 0, got {std}")
    return lambda bits: np.exp(_philox.normal(bits) * std + mean)


def _exponential(dtype: torch.dtype, rate: float) -> Make:
    require(rate > 0, f"exponential_ on a DTensor needs lambd > 0, got {rate}")
    info = torch.finfo(dtype)  # never zero, also rounded: logarithms are taken of these values
    least = info.smallest_normal * (info.eps if dtype is torch.float16 else 1.0)
    return lambda bits: np.maximum(np.log(_philox.open_uniform(bits)) / -rate, least)


def _cauchy(dtype: torch.dtype, median: float, sigma: float) -> Make:
    require(sigma > 0, f"cauchy_ on a DTensor needs sigma > 0, got {sigma}")
    return lambda bits: np.tan(np.pi * (_philox.open_uniform(bits) - 0.5)) * sigma + median


def _geometric(dtype: torch.dtype, p: float) -> Make:
    require(0 < p < 1, f"geometric_ on a DTensor needs p between 0 and 1, got {p}")
    most = math.inf
    if dtype in INTEGERS:
        exact = torch.iinfo(dtype).max
        most = float(exact) if float(exact) <= exact else math.nextafter(float(exact), 0)
    return lambda bits: np.clip(np.ceil(np.log(_philox.open_uniform(bits)) / math.log1p(-p)), 1, most)


UNIFORM = Distribution("uniform_", _uniform, FLOATS | COMPLEX, (("from", 0.0), ("to", 1.0)))
NORMAL = Distribution("normal_", _normal, FLOATS | COMPLEX, (("mean", 0.0), ("std", 1.0)))
LOG_NORMAL = Distribution("log_normal_", _log_normal, FLOATS, (("mean", 1.0), ("std", 2.0)))
EXPONENTIAL = Distribution("exponential_", _exponential, FLOATS, (("lambd", 1.0),))
CAUCHY = Distribution("cauchy_", _cauchy, FLOATS, (("median", 0.0), ("sigma", 1.0)))
GEOMETRIC = Distribution("geometric_", _geometric, FLOATS | INTEGERS, (("p", math.nan),))


def integers(name: str, dtype: torch.dtype, low: int, high: int) -> Make:
    """In [low, high), also where the dtype rounds."""
    least, most = _bounds(name, dtype)
    require(low < high, f"{name} on a DTensor needs low < high, got low={low}, high={high}")
    told = f"{name} on a DTensor of {dtype} holds {least} to {most}, got low={low}, high={high}"
    require(least <= low and high - 1 <= most, told)
    if not dtype.is_floating_point:
        return lambda bits: _philox.integers(bits, low, high)
    first, last = _rounded(low, dtype, math.inf), _rounded(high - 1, dtype, -math.inf)
    return lambda bits: np.clip(_philox.integers(bits, low, high), first, last)


def random_integers(dtype: torch.dtype, args: Any, kwargs: Any) -> Make:
    """``random_()``, ``random_(to)``, ``random_(from, to)``; without ``to``, up to what the dtype counts to."""
    given = dict(zip(("from", "to") if len(args) > 2 or "to" in kwargs else ("to",), args[1:], strict=False))
    given.update((name, kwargs[name]) for name in ("from", "to") if name in kwargs)
    low = operator.index(given.get("from", 0))
    if given.get("to") is not None or ("from" not in given and "to" in given):
        return integers("random_", dtype, low, operator.index(given["to"]))
    digits = _philox.DIGITS.get(dtype)
    most = _bounds("random_", dtype)[1] if digits is None else 2**digits
    return integers("random_", dtype, low, int(min(most, 2**63 - 1)) + 1)


def _bounds(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the greatest value of ``dtype``."""
    if dtype is torch.bool:
        return 0, 1
    require_dtype(name, dtype, FLOATS | INTEGERS)
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def _rounded(value: int, dtype: torch.dtype, towards: float) -> int:
    """Return the nearest number of ``dtype`` that is not on the other side of ``value``."""
    near = torch.tensor(value).to(dtype)
    if (int(near.item()) - value) * towards < 0:
        near = torch.nextafter(near, torch.tensor(towards, dtype=dtype))
    return int(near.item())
