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


def tree_reduce_into(output: Tensor, tensors: Sequence[Tensor], op: ReduceOp) -> None:
    """Write what ``tree_reduce`` returns to ``output``; ``tensors``, of its shape, are used up.

    >>> found = torch.zeros(1)
    >>> tree_reduce_into(found, [torch.ones(1), torch.ones(1), torch.ones(1)], ReduceOp.SUM)
    >>> found
    tensor([3.])
    """
    combine = _COMBINE[op]
    level = list(tensors)
    while len(level) > 2:
        paired = [combine(level[i], level[i + 1], out=level[i]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    if len(level) == 2:
        combine(level[0], level[1], out=output)
    elif output is not level[0]:
        output.copy_(level[0])
    if op is ReduceOp.AVG:
        output.div_(len(tensors))
