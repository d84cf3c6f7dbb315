"""Brings what gloo does not carry as it should into a form in which it does: int16, and floats under min and max.

Owns ``carried`` and ``put_back``. gloo has no int16. Its min and max of floats lose a NaN or keep it, depending on the
rank it is on, where torch's keep it always; integers whose order is that of the floats, with NaN beyond the last, have
no such trouble and are of the same size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.transports._interface import ReduceOp

_SAME_SIZE = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def carried(tensor: Tensor, op: ReduceOp) -> Tensor | None:
    """Return a copy of ``tensor`` to be reduced in its place; None if gloo reduces ``tensor`` itself as torch would.

    >>> carried(torch.tensor([1.0, float("nan")]), ReduceOp.MAX)
    tensor([1065353216, 2147483647], dtype=torch.int32)
    """
    integers = _SAME_SIZE.get(tensor.dtype) if op in (ReduceOp.MIN, ReduceOp.MAX) else None
    if integers is None:
        return tensor.to(torch.int32) if tensor.dtype is torch.int16 else None
    limits = torch.iinfo(integers)
    last = limits.max if op is ReduceOp.MAX else limits.min
    ordered = _reordered(tensor.contiguous().view(integers)).masked_fill_(tensor.isnan(), last)
    return ordered.to(torch.int32) if integers is torch.int16 else ordered


def put_back(tensor: Tensor, reduced: Tensor) -> None:
    """Write to ``tensor`` what ``reduced``, made by ``carried``, has become."""
    integers = _SAME_SIZE.get(tensor.dtype)
    if integers is not None:
        reduced = _reordered(reduced.to(integers)).view(tensor.dtype)
    tensor.copy_(reduced.view(tensor.shape))


def _reordered(bits: Tensor) -> Tensor:
    """Floats' bits as integers in their order, and back: below zero all bits but the sign are turned round."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
