"""Random bits that belong to elements: each element of a tensor has its own, wherever the element lives.

Owns ``element_bits`` and the distributions made from it. Pure: a function of the stream (seed, number of the draw)
and of the layout. Element i of the flattened global tensor gets word i of the Philox sequence of its stream, so any
rank can make the words of the elements it holds without making the others'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.tensor._spec import Spec

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

SHORT_RUN = 64  # below this many neighbouring elements, making the words between the runs too is quicker


def words(stream: tuple[int, int], start: int, count: int) -> Words:
    """Words ``start .. start + count`` of the stream."""
    generator = np.random.Philox(key=np.array(stream, dtype=np.uint64))
    generator.advance(start // 4)
    skip = start % 4
    drawn = np.asarray(generator.random_raw(count + skip), dtype=np.uint64)
    return drawn[skip:]


def element_bits(spec: Spec, stream: tuple[int, int]) -> Words:
    """One word for each element this rank holds of a tensor laid out as ``spec``, shaped like the local tensor."""
    shape = spec.shape
    local_shape = spec.local_shape
    cut = [d for d in range(len(shape)) if spec.cuts(d)]
    if not cut or math.prod(local_shape) == 0:
        return words(stream, 0, math.prod(local_shape)).reshape(local_shape)
    held = [np.asarray(spec.local_indices(d)) if d in cut else np.arange(n) for d, n in enumerate(shape)]
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


def _runs(indices: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges of neighbouring indices: (first, count)."""
    breaks = np.nonzero(np.diff(indices) != 1)[0] + 1
    return [(int(part[0]), len(part)) for part in np.split(indices, breaks)]


def uniform(bits: Words) -> Floats:
    """In [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(bits: Words) -> Floats:
    """Standard normal, by the method of Box and Muller from the two halves of a word."""
    radius = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    result: Floats = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    return result


def integers(bits: Words, low: int, high: int) -> npt.NDArray[np.int64]:
    """In [low, high)."""
    return (bits % np.uint64(high - low)).astype(np.int64) + low


def to_tensor(values: npt.NDArray[np.generic], like: Tensor, shape: Sequence[int]) -> Tensor:
    """As a tensor of ``like``'s dtype on its device. Rounding to a narrow dtype must not turn 0.99... into 1."""
    if not values.size:  # numpy has other strides for nothing
        return torch.empty(tuple(shape), device=like.device, dtype=like.dtype)
    made = torch.from_numpy(np.ascontiguousarray(values)).reshape(tuple(shape))
    return made.to(device=like.device, dtype=like.dtype)


def uniform_tensor(spec: Spec, stream: tuple[int, int], like: Tensor) -> Tensor:
    """Uniform in [0, 1) for the local elements, with as many bits as the dtype resolves."""
    values = uniform(element_bits(spec, stream))
    digits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(like.dtype, 53)
    return to_tensor(np.floor(values * 2.0**digits) * 2.0**-digits, like, spec.local_shape)
