"""Elementwise functions that are linear: what is still a partial sum may pass through them.

Owns ``linear_choices`` and ``LINEAR``, which says for each function in which arguments; ``pointwise.py`` has the rules
that use it.
"""

from __future__ import annotations

import cmath
from numbers import Number
from typing import Any

import torch

from phalanx.tensor.layout._placement import REPLICATE, Partial
from phalanx.tensor.ops._rule import Call, Choice

CAST_NAMES = {
    "bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "chalf": torch.complex32, "cfloat": torch.complex64, "cdouble": torch.complex128, "bool": torch.bool,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip

# Linear: for each operation the sets of tensor arguments that may be partial together (the others replicated).
_ONE = ((0,),)
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(
        (
            "clone", "contiguous", "detach", "neg", "negative", "positive", "conj", "conj_physical", "real", "imag",
            "to", "type", "cpu", "cuda", "zeros_like", "ones_like", "empty_like", "full_like", "zero",
            "deg2rad", "rad2deg", "resolve_conj", "resolve_neg", *CAST_NAMES,
        ),
        _ONE,
    ),
    "add": ((0, 1),), "sub": ((0, 1),), "subtract": ((0, 1),), "rsub": ((0, 1),), "copy": ((0, 1),),
    "mul": ((0,), (1,)), "multiply": ((0,), (1,)), "div": ((0,),), "divide": ((0,),), "true_divide": ((0,),),
    "where": (),  # see _sets
}  # fmt: skip

# Of these a constant second argument is added: not linear unless both are tensors.
_NEEDS_TWO = frozenset({"add", "sub", "subtract", "rsub", "copy", "where"})
_DIVISIONS = frozenset({"div", "divide", "true_divide"})
_IDENTITY = frozenset(
    {"clone", "detach", "contiguous", "cpu", "cuda", "positive"}
)  # whatever is partial stays so
_CASTS = frozenset({"to", "type", "copy", *CAST_NAMES})


def linear_choices(call: Call) -> list[Choice]:
    """Inputs that are partial together, and a result that is so too."""
    sets = _sets(call)
    if not sets or not _is_linear_in_numbers(call) or (call.name in _NEEDS_TWO and len(call.inputs) < 2):
        return []
    unchanged = call.name in _CASTS and not call.in_place and _cast_to(call) is call.inputs[0].dtype
    if call.name in _CASTS and not unchanged and not _stays_inexact(call):
        return []
    ops = {p.reduce_op for one in call.inputs for p in one.spec.placements if isinstance(p, Partial)}
    choices = []
    for op in sorted(ops if unchanged or call.name in _IDENTITY else ops & {"sum", "avg"}):
        partial = Partial(op)
        for together in sets:
            if max(together) >= len(call.inputs):
                continue
            if call.kwargs.get("rounding_mode") is not None:
                continue
            inputs = tuple(partial if i in together else REPLICATE for i in range(len(call.inputs)))
            choices.append(Choice(inputs, (partial,)))
    return choices


def _is_linear_in_numbers(call: Call) -> bool:
    """Whether numbers among the arguments leave sums as they are: infinities of both signs do not add up to the
    infinity that the sum has. Not-a-number is the same either way.
    """
    numbers: list[Any] = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Number)]
    if call.name in _DIVISIONS and 0 in numbers:
        return False
    return not any(cmath.isinf(number) for number in numbers if not isinstance(number, int))


def _sets(call: Call) -> tuple[tuple[int, ...], ...]:
    if call.name != "where":
        return LINEAR.get(call.name, ())
    # the condition is the first argument of torch.where and the second of Tensor.where
    values = tuple(i for i, one in enumerate(call.inputs) if one.dtype.is_floating_point)
    return (values,) if len(call.inputs) == 3 and len(values) == 2 else ()


def _stays_inexact(call: Call) -> bool:
    """Whether a cast keeps a floating or complex dtype (casting a sum to integers is not linear)."""
    if call.in_place:
        kinds = {one.dtype for one in call.inputs}
        return len(kinds) == 1 and all(kind.is_floating_point for kind in kinds)
    before, after = call.inputs[0].dtype, _cast_to(call)
    if after is None or after.itemsize < before.itemsize:
        return False  # rounding each contribution is not rounding the sum
    return (before.is_floating_point and (after.is_floating_point or after.is_complex)) or (
        before.is_complex and after.is_complex
    )


def _cast_to(call: Call) -> torch.dtype | None:
    """The dtype of a cast; None if it is given by name."""
    given = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)]
    if given or call.name == "type":
        return given[0] if given else None
    return CAST_NAMES.get(call.name, call.inputs[-1].dtype)
