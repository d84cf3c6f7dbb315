"""Folds the values of all ranks into one: always the same binary tree, whatever rank or algorithm does it.

The tree is that of ``transports._reduce.tree_reduce`` (neighbours pairwise, level by level), which tests compare
with; the forms here write into given memory and allocate nothing. Every node rounds once in the tensor's own dtype, so
results have the same bits on every rank, in every run, through slots or on shared buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.comm.transports._interface import ReduceOp
from phalanx.comm.transports._tree_reduce import _COMBINE


@lru_cache
def merges(count: int) -> tuple[tuple[int, int], ...]:
    """Return the tree as pairs (i, j), in order: value i becomes value i with value j; the result ends in value 0.

    >>> merges(5)
    ((0, 1), (2, 3), (0, 2), (0, 4))
    """
    pairs: list[tuple[int, int]] = []
    stride = 1
    while stride < count:
        pairs += [(i, i + stride) for i in range(0, count - stride, 2 * stride)]
        stride *= 2
    return tuple(pairs)


class Fold:
    """One operation on one dtype over ``count`` ranks.

    >>> fold = Fold(ReduceOp.SUM, torch.float32, 2)
    >>> out = torch.empty(2)
    >>> fold.into(out, [torch.ones(2), torch.tensor([1.0, 2.0])])
    >>> out
    tensor([2., 3.])
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype, count: int) -> None:
        self._combine = _COMBINE[op]
        self._count = count
        self._average = op is ReduceOp.AVG
        self._dtype = dtype
        self._scratch: list[Tensor] = []

    def into(self, out: Tensor, values: Sequence[Tensor]) -> None:
        """Combine ``values`` into ``out``, which overlaps none of them or is one of them."""
        if self._count == 2:
            self._combine(values[0], values[1], out=out)
        elif self._count == 1:
            out.copy_(values[0])
        elif out.data_ptr() in map(Tensor.data_ptr, values):
            # An inner node would write over that value before it is needed.
            out.copy_(self._tree(values, 1, self._space(0, out.numel())))
        else:
            self._tree(values, 0, out)
        if self._average:
            out.div_(self._count)

    def _tree(self, values: Sequence[Tensor], depth: int, out: Tensor) -> Tensor:
        if len(values) == 1:
            return values[0]
        left_count = 1 << (len(values) - 1).bit_length() - 1  # the largest power of two below
        left = self._tree(values[:left_count], depth, out)
        right = self._tree(values[left_count:], depth + 1, self._space(depth, out.numel()))
        self._combine(left, right, out=out)
        return out

    def _space(self, depth: int, count: int) -> Tensor:
        while len(self._scratch) <= depth:
            self._scratch.append(torch.empty(0, dtype=self._dtype))
        if self._scratch[depth].numel() < count:
            self._scratch[depth] = torch.empty(count, dtype=self._dtype)
        return self._scratch[depth][:count]

    def in_place(self, values: Sequence[Tensor]) -> None:
        """Combine into ``values[0]``, using the others as scratch, and copy the result into all of them."""
        for i, j in merges(self._count):
            self._combine(values[i], values[j], out=values[i])
        result = values[0]
        if self._average:
            result.div_(self._count)
        for other in values[1:]:
            other.copy_(result)
