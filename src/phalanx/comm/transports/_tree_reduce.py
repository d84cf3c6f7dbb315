"""Reduces a list of tensors in one fixed order: a binary tree over positions.

Owns the arithmetic that every transport of ours must agree on: neighbours are combined pairwise, level by level, the
odd one out moves up unchanged. The order depends on positions only, so the bits of the result do too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.comm.transports._interface import ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def tree_reduce(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction of ``tensors``, which are left as they are.

    >>> tree_reduce([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)], ReduceOp.SUM)
    tensor(7.)
    """
    if not tensors:
        raise ValueError("tree_reduce got no tensors; expected at least one")
    combine = _COMBINE[op]
    level = list(tensors)
    while len(level) > 1:
        paired = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    result = level[0] if len(tensors) > 1 else level[0].clone()
    return result.div_(len(tensors)) if op is ReduceOp.AVG else result
