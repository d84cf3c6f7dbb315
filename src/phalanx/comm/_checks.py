"""Which tensors a collective takes, and the views under which the odd ones travel.

Owns the rules for dtypes and layouts, so that transports see only contiguous tensors and, in reductions, only
integers and real floats. Rules: a bool is or-ed by sum / max / bor and and-ed by product / min / band; a complex sum
is the sum of its parts; what has no meaning (the mean of integers, the minimum of complex numbers, bits of floats) is
refused with a ``TypeError`` that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm._transport import ReduceOp

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_BOOL_AS: dict[ReduceOp, ReduceOp] = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}


def parse_op(op: ReduceOp | str) -> ReduceOp:
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(member.value for member in ReduceOp)
        raise ValueError(f"unknown reduction {op!r}; expected one of {names}") from None


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse what no transport can carry."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} got a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} got a tensor of layout {tensor.layout}; expected a dense one (call .to_dense())"
        )
    if tensor.is_quantized:
        raise TypeError(f"{name} got a quantized tensor; send .int_repr() with its scale and zero point")


def reducible(name: str, tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """The view and the operation under which ``tensor`` is reduced."""
    dtype = tensor.dtype
    if dtype in _FLOATS:
        if op in _BITWISE:
            raise TypeError(f"{name} with op {op.value!r} got {dtype}; expected integers or bool")
        return tensor, op
    if dtype in _INTEGERS:
        if op is ReduceOp.AVG:
            raise TypeError(
                f"{name} with op 'avg' got {dtype}; reduce with 'sum' and divide, or cast to a float"
            )
        return tensor, op
    if dtype is torch.bool:
        if op is ReduceOp.AVG:
            raise TypeError(f"{name} with op 'avg' got torch.bool; cast to a float first")
        return tensor.view(torch.uint8), _BOOL_AS[op]
    if dtype.is_complex and op in (ReduceOp.SUM, ReduceOp.AVG) and not tensor.is_conj():
        return torch.view_as_real(tensor), op
    raise TypeError(
        f"{name} with op {op.value!r} cannot reduce {dtype}; cast to a real float or an integer type first"
    )


def check_sizes(name: str, rank: int, total: int, parts: Sequence[int], what: str) -> None:
    if sum(parts) != total:
        raise ValueError(
            f"rank {rank}: {name} {what} sum to {sum(parts)} but the tensor's first dim is {total}"
        )
