"""Random bits that belong to elements: each element of a tensor has its own, wherever the element lives.

Owns ``element_bits`` and the distributions made from it. Pure: a function of the stream (seed, number of the draw)
and of the layout. Element i of the flattened global tensor gets word i of the Philox sequence of its stream, so any
rank can make the words of the elements it holds without making the others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.tensor.layout._placement import Shard
from phalanx.tensor.layout._spec import Spec

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Make = Callable[[Words], npt.NDArray[Any]]  # values of words, element by element

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

SHORT_RUN = 64  # below this many neighbouring elements, making the words between the runs too is quicker


def words(stream: tuple[int, int], start: int, count: int) -> Words:
    """Words ``start .. start + count`` of the stream."""
    generator = np.random.Philox(key=np.array(stream, dtype=np.uint64))
    generator.advance(start // 4)
    skip = start % 4
    drawn = np.asarray(generator.random_raw(count + skip), dtype=np.uint64)
    return drawn[skip:]


def element_bits(spec: Spec, stream: tuple[int, int]) -> Words:
    """Return one word for each element this rank holds of a tensor laid out as ``spec``, shaped like the local
    tensor."""
    shape = spec.shape
    local_shape = spec.local_shape
    cut = [d for d in range(len(shape)) if spec.shards(d)]
    if not cut or math.prod(local_shape) == 0:
        return words(stream, 0, math.prod(local_shape)).reshape(local_shape)
    held = [_held(spec, d) if d in cut else np.arange(n) for d, n in enumerate(shape)]
    last = cut[-1]
    inner = math.prod(shape[last + 1 :])
    runs = _runs(held[last])
    if min(length for _, length in runs) * inner < SHORT_RUN:
        whole = words(stream, 0, math.prod(shape)).reshape(shape)
        picked: Words = whole[np.ix_(*held)]
        return picked
    bases = np.zeros(1, dtype=np.int64)
    for d in range(last):
        bases = (bases[:, None] * shape[d] + held[d][None, :]).reshape(-1)
    pieces = [
        words(stream, (int(base) * shape[last] + start) * inner, length * inner)
        for base in bases
        for start, length in runs
    ]
    return np.concatenate(pieces).reshape(local_shape)


def _held(spec: Spec, dim: int) -> npt.NDArray[np.int64]:
    """``spec.local_indices(dim)``, without a list of a long dim where plain shards make it one range."""
    if any(type(placement) is not Shard for placement, _, _ in spec.shards(dim)):
        return np.asarray(spec.local_indices(dim), dtype=np.int64)
    start = spec.local_offset(dim)
    return np.arange(start, start + spec.local_shape[dim])


def _runs(indices: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges of neighbouring indices: (first, count)."""
    breaks = np.nonzero(np.diff(indices) != 1)[0] + 1
    return [(int(part[0]), len(part)) for part in np.split(indices, breaks)]


def uniform(bits: Words) -> Floats:
    """In [0, 1)."""
    value: Floats = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return value


def cut_uniform(bits: Words, dtype: torch.dtype) -> Floats:
    """In [0, 1) with as many digits as ``dtype`` has: rounding must not turn 0.99... into 1."""
    digits = DIGITS[dtype.to_real()]
    value: Floats = (bits >> np.uint64(64 - digits)).astype(np.float64) * 2.0**-digits
    return value


def open_uniform(bits: Words) -> Floats:
    """In (0, 1): of which logarithms are finite and not zero."""
    value: Floats = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return value


def is_below(bits: Words, chance: float) -> npt.NDArray[np.bool_]:
    """True with probability ``chance``, to 64 bits."""
    if chance >= 1:
        return np.ones(bits.shape, dtype=np.bool_)
    below: npt.NDArray[np.bool_] = bits < np.uint64(int(chance * 2.0**64))
    return below


def normal(bits: Words) -> Floats:
    """Standard normal, by the method of Box and Muller from the two halves of a word."""
    radius = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    result: Floats = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    return result


def integers(bits: Words, low: int, high: int) -> npt.NDArray[np.int64]:
    """In [low, high), which may be all numbers of 64 bits."""
    span = high - low
    offsets = bits if span == 1 << 64 else bits % np.uint64(span)
    value: npt.NDArray[np.int64] = (offsets + np.uint64(low & 0xFFFFFFFFFFFFFFFF)).view(np.int64)
    return value


def filled(spec: Spec, stream: tuple[int, int], make: Make, device: torch.device) -> Tensor:
    """Return this rank's local tensor of a tensor laid out as ``spec`` and filled with ``make(words)``, rounded to its
    dtype last.

    The real and the imaginary part of a complex number have a word each, side by side in a last dim of two.
    """
    if math.prod(spec.local_shape) == 0:  # numpy has other strides for nothing
        return torch.empty(spec.local_shape, dtype=spec.dtype, device=device)
    if not spec.dtype.is_complex:
        return _to_tensor(make(element_bits(spec, stream)), spec.dtype, device).reshape(spec.local_shape)
    pairs = Spec.of(spec.mesh, spec.placements, (*spec.shape, 2), spec.dtype.to_real())
    made = _to_tensor(make(element_bits(pairs, stream)), pairs.dtype, device)
    return torch.view_as_complex(made.reshape(*spec.local_shape, 2))


def _to_tensor(values: npt.NDArray[np.generic], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)
