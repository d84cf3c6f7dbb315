"""Which operation a torch function is: one name for ``torch.add``, ``Tensor.add``, ``Tensor.add_``, ``+`` and ``+=``.

Owns ``op_name``, and the names and order of keyword arguments. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

_DUNDER = {
    "add": "add", "radd": "add", "iadd": "add_", "sub": "sub", "rsub": "rsub", "isub": "sub_",
    "mul": "mul", "rmul": "mul", "imul": "mul_", "truediv": "div", "rtruediv": "rdiv", "itruediv": "div_",
    "div": "div", "rdiv": "rdiv", "idiv": "div_",
    "floordiv": "floor_divide", "rfloordiv": "rfloor_divide", "ifloordiv": "floor_divide_",
    "mod": "remainder", "rmod": "remainder", "imod": "remainder_",
    "pow": "pow", "rpow": "rpow", "ipow": "pow_", "matmul": "matmul", "rmatmul": "rmatmul", "imatmul": "imatmul",
    "and": "bitwise_and", "rand": "bitwise_and", "iand": "bitwise_and_",
    "or": "bitwise_or", "ror": "bitwise_or", "ior": "bitwise_or_",
    "xor": "bitwise_xor", "rxor": "bitwise_xor", "ixor": "bitwise_xor_",
    "lshift": "bitwise_left_shift", "ilshift": "bitwise_left_shift_", "rlshift": "rlshift",
    "rshift": "bitwise_right_shift", "irshift": "bitwise_right_shift_", "rrshift": "rrshift",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
    "neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not",
}  # fmt: skip


class OpName(NamedTuple):
    """The name of an operation; ``in_place`` if it writes to its first argument."""

    base: str
    in_place: bool


@cache
def op_name(func: Any) -> OpName:
    """
    >>> import torch
    >>> op_name(torch.Tensor.__iadd__), op_name(torch.relu)
    (OpName(base='add', in_place=True), OpName(base='relu', in_place=False))
    """
    schema = getattr(func, "_qualified_op_name", None) or getattr(getattr(func, "_schema", None), "name", "")
    if schema and not schema.startswith(
        "aten::"
    ):  # an operation of a library, never torch's of the same name
        return OpName(schema, False)
    name = getattr(func, "__name__", type(func).__name__)
    if isinstance(func, FunctionType) and (func.__module__ or "").partition(".")[0] != "torch":
        return OpName(
            f"{func.__module__}.{name}", False
        )  # a user's, which may have the name of one of torch's
    if name in ("__get__", "__set__", "__delete__"):
        return OpName(f"{func.__self__.__name__}.{name.strip('_')}", False)
    if name.startswith("__") and name.endswith("__"):
        name = _DUNDER.get(name[2:-2], name)
        if name.startswith("__"):
            return OpName(name, name == "__setitem__")
    if name.endswith("_") and not name.endswith("__"):
        return OpName(name[:-1], True)
    return OpName(name, False)


# torch takes numpy's names for these arguments too, in every function.
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


def torch_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` under torch's names.

    >>> torch_keywords({"axis": 0, "keepdims": True})
    {'dim': 0, 'keepdim': True}
    """
    return {_NUMPY.get(name, name): value for name, value in kwargs.items()}


def in_signature_order(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` in the order of the signature, which is how rules tell several tensors apart.

    >>> list(in_signature_order(torch.matmul, {"other": torch.ones(1), "input": torch.ones(1)}))
    ['input', 'other']
    """
    if sum(isinstance(value, torch.Tensor) for value in kwargs.values()) < 2:
        return kwargs
    order = _parameters(op_name(func).base)
    return dict(sorted(kwargs.items(), key=lambda item: order.get(_NUMPY.get(item[0], item[0]), len(order))))


def first_by_position(func: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that has keywords only, with ``input`` by position, where every handler looks for it.

    Functions written in Python hand it over by position themselves, or have names of their own.

    >>> first_by_position(torch.sum, {"input": 1, "dim": 0})
    ((1,), {'dim': 0})
    """
    named = torch_keywords(kwargs)
    if (
        isinstance(func, FunctionType)
        or "input" not in named
        or _parameters(op_name(func).base).get("input") != 0
    ):
        return (), kwargs
    return (named.pop("input"),), named


@cache
def _parameters(base: str) -> dict[str, int]:
    """Where each parameter of an operation of torch stands, over all of its signatures."""
    packet = getattr(torch.ops.aten, base, None)
    places: dict[str, int] = {}
    for overload in packet.overloads() if packet is not None else ():
        for place, argument in enumerate(getattr(packet, overload)._schema.arguments):
            name = "input" if argument.name == "self" else argument.name
            places[name] = max(place, places.get(name, 0))
    return places
