"""Checks which tensors a collective takes, and gives the views under which the odd ones travel.

Owns the rules for dtypes and layouts, so that transports see only contiguous tensors and, in reductions, only
integers and real floats. Rules: a bool is or-ed by sum / max / bor and and-ed by product / min / band; a complex sum
is the sum of its parts; what has no meaning (the mean of integers, the minimum of complex numbers, bits of floats) is
refused with a ``TypeError`` that says what to do instead.

A transport takes the address of a tensor. Zeros that torch has not made yet (the gradient of ``sgn``) have none: they
are made before they are sent (``_staging.settled``), and refused where a result is to be written. Whatever else has no
memory of its own (meta and fake tensors, what ``torch.func`` hands to a function) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._torch_private import (
    FakeTensor,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    is_zerotensor,
)
from phalanx.comm.transports._interface import ReduceOp

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


_OPS = {member: member for member in ReduceOp}
# Torch's own values compare equal to their members but do not hash like them.
_TORCHS = [(getattr(dist.ReduceOp, member.name), member) for member in ReduceOp]
# What any transport moves without a second look; others (quantized ones, for example) are looked at closely.
MOVED: frozenset[torch.dtype | None] = _FLOATS | _INTEGERS | {torch.bool}
# What is reduced as it is, by the op (or its name) and the dtype; two lookups decide for nearly every call.
PLAIN: dict[str, dict[torch.dtype | None, ReduceOp]] = {
    op.value: {
        dtype: op
        for dtype in _FLOATS | _INTEGERS
        if not (op in _BITWISE and dtype in _FLOATS) and not (op is ReduceOp.AVG and dtype in _INTEGERS)
    }
    for op in ReduceOp
}


TENSORS = (Tensor, torch.nn.Parameter)
STRIDED = torch.strided
# The short ways are for tensors that have an address (``data_ptr``); ``check_tensor`` says what those without one are.
# They ask for a sign that torch put off (``is_neg``) only where there is one element: such tensors are
# imaginary parts of conjugated ones, every other element in memory, so that with more they are not contiguous.


def parse_op(op: ReduceOp | str) -> ReduceOp:
    try:
        return _OPS[op]  # type: ignore[index]  # members hash and compare as their names
    except (KeyError, TypeError):
        for theirs, ours in _TORCHS:
            if op == theirs:
                return ours
        names = ", ".join(member.value for member in ReduceOp)
        raise ValueError(f"unknown reduction {op!r}; expected one of {names}") from None


def check_tensor(name: str, tensor: Tensor, *, written: bool = False) -> None:
    """Refuse what no transport can carry; ``written``: or what no result can be written to."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} got a {type(tensor).__name__}; expected a torch.Tensor")
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        raise TypeError(f"{name} got a {type(tensor).__name__}; expected this rank's part of it: call .to_local()")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} got a tensor of layout {tensor.layout}; expected a dense one (call .to_dense())")
    if tensor.is_quantized:
        raise TypeError(f"{name} got a quantized tensor; send .int_repr() with its scale and zero point")
    if tensor.is_nested:
        raise TypeError(f"{name} got a nested tensor; send its components (.unbind()), or a padded one")
    if is_functorch_wrapped_tensor(tensor) or is_functional_tensor(tensor):
        raise TypeError(
            f"{name} got a tensor that stands for another one inside a transform of torch.func (grad, vmap, ...) and "
            f"has no memory of its own; call the collective outside of the transform"
        )
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        what = "tensor on meta" if tensor.is_meta else "FakeTensor"
        raise TypeError(
            f"{name} got a {what} of {tuple(tensor.shape)}, without data; "
            f"give it memory first, for example with torch.empty_like(t, device='cpu')"
        )
    if written and is_zerotensor(tensor):
        raise TypeError(
            f"{name} cannot write its result to zeros that torch has not made yet (a ZeroTensor, such as the gradient "
            f"of sgn); pass its .clone()"
        )


def reducible(name: str, tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """Return the view and the operation under which ``tensor`` is reduced."""
    dtype = tensor.dtype
    if dtype in _FLOATS:
        if op in _BITWISE:
            raise TypeError(f"{name} with op {op.value!r} got {dtype}; expected integers or bool")
        return tensor, op
    if dtype in _INTEGERS:
        if op is ReduceOp.AVG:
            raise TypeError(f"{name} with op 'avg' got {dtype}; reduce with 'sum' and divide, or cast to a float")
        return tensor, op
    if dtype is torch.bool:
        if op is ReduceOp.AVG:
            raise TypeError(f"{name} with op 'avg' got torch.bool; cast to a float first")
        return tensor.view(torch.uint8), _BOOL_AS[op]
    if dtype.is_complex and op in (ReduceOp.SUM, ReduceOp.AVG):
        return torch.view_as_real(tensor), op
    raise TypeError(f"{name} with op {op.value!r} cannot reduce {dtype}; cast to a real float or an integer type first")


class Ranked(Protocol):
    """Who asks: errors name the rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


def check_rank(at: Ranked, name: str, what: str, rank: int) -> None:
    if not 0 <= rank < at.size:
        raise ValueError(f"rank {at.rank}: {name} with {what}={rank}; expected a rank in [0, {at.size})")


def check_peer(at: Ranked, name: str, what: str, rank: int) -> None:
    check_rank(at, name, what, rank)
    if rank == at.rank:
        raise ValueError(f"rank {at.rank}: {name} with {what}={rank} is this rank itself; expected another")


def check_others(at: Ranked, name: str) -> None:
    if at.size == 1:
        raise ValueError(f"rank {at.rank}: {name} in a group of 1 rank; expected one with others that can send")


def check_list(
    at: Ranked,
    name: str,
    what: str,
    tensors: Sequence[Tensor] | None,
    like: Tensor | None,
    *,
    written: bool = False,
) -> None:
    """Check that there is one tensor per rank, all of one dtype."""
    if tensors is None or len(tensors) != at.size:
        got = "None" if tensors is None else f"{len(tensors)} tensors"
        raise ValueError(f"rank {at.rank}: {name} got {got} as {what}; expected one per rank ({at.size})")
    for index, tensor in enumerate(tensors):
        check_tensor(name, tensor, written=written)
        if like is not None and tensor.dtype != like.dtype:
            raise TypeError(f"rank {at.rank}: {name} got {what}[{index}] of {tensor.dtype}; expected {like.dtype}")


def check_same_shape(at: Ranked, name: str, what: str, listed: Tensor, own: Tensor) -> None:
    if listed.shape != own.shape:
        raise ValueError(
            f"rank {at.rank}: {name} got {what}[{at.rank}] of shape {tuple(listed.shape)}; "
            f"expected this rank's own {tuple(own.shape)}"
        )


def check_flat(at: Ranked, name: str, whole: Tensor, part: Tensor, written: Tensor) -> None:
    """``whole`` holds one ``part`` per rank; one of them is to be ``written``."""
    check_tensor(name, whole, written=whole is written)
    check_tensor(name, part, written=part is written)
    if whole.dtype != part.dtype:
        raise TypeError(f"rank {at.rank}: {name} got {whole.dtype} and {part.dtype}; expected one dtype")
    if whole.numel() != part.numel() * at.size:
        raise ValueError(
            f"rank {at.rank}: {name} got {whole.numel()} and {part.numel()} elements; "
            f"expected the larger to be {at.size} (the group's size) times the smaller"
        )


def split_parts(at: Ranked, name: str, what: str, tensor: Tensor, splits: Sequence[int] | None) -> list[Tensor]:
    """Return the parts of dim 0 that go to, or come from, each rank."""
    if tensor.dim() == 0:
        raise ValueError(f"rank {at.rank}: {name} got a 0-d tensor; expected at least one dim to split")
    total = tensor.shape[0]
    if splits is None:
        if total % at.size:
            raise ValueError(
                f"rank {at.rank}: {name} got a first dim of {total}, which {at.size} ranks do not divide; pass {what}"
            )
        splits = [total // at.size] * at.size
    if len(splits) != at.size:
        raise ValueError(f"rank {at.rank}: {name} got {len(splits)} {what}; expected {at.size}")
    if sum(splits) != total:
        raise ValueError(f"rank {at.rank}: {name} {what} sum to {sum(splits)} but the tensor's first dim is {total}")
    return list(torch.split(tensor, list(splits)))


def shard_dtype(size: int, whole: Tensor, part: Tensor) -> torch.dtype | None:
    """Return the dtype if ``whole`` is one ``part`` per rank and both can travel as they are, as nearly always."""
    if type(whole) in TENSORS and type(part) in TENSORS:
        dtype, count = whole.dtype, part.numel()
        try:
            if (
                part.dtype is dtype
                and whole.is_contiguous()
                and part.is_contiguous()
                and whole.numel() == count * size
                and whole.layout is STRIDED
                and part.layout is STRIDED
                and whole.data_ptr()
                and part.data_ptr()
                and not (whole.is_nested or part.is_nested)
                and (count != 1 or not (whole.is_neg() or part.is_neg()))
            ):
                return dtype
        except RuntimeError:  # from data_ptr, which some tensors have not, or is_contiguous, on sparse layouts
            pass
    return None


def equal_parts(size: int, output: Tensor, tensor: Tensor) -> bool:
    """Return whether both are equal parts, one per rank, of tensors that can travel as they are."""
    return (
        is_plain(output)
        and is_plain(tensor)
        and output.dtype is tensor.dtype
        and output.shape == tensor.shape
        and output.numel() > 0
        and output.dim() > 0
        and output.shape[0] % size == 0
    )


def is_plain(tensor: Tensor) -> bool:
    try:
        return (
            type(tensor) in TENSORS
            and tensor.layout is STRIDED
            and tensor.dtype in MOVED
            and tensor.data_ptr() != 0
            and tensor.is_contiguous()
            and not tensor.is_nested
            and (tensor.numel() != 1 or not tensor.is_neg())
        )
    except RuntimeError:  # from data_ptr: inside a transform of torch.func
        return False
