"""Signatures of torch's functions: the order of keyword arguments, and where 0-d tensors stand for numbers.

Owns ``in_signature_order``, ``first_by_position`` and ``tensor_places``. Pure.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch

from phalanx._torch_private import schema_of
from phalanx.tensor.ops._registry import op_name
from phalanx.tensor.ops._rule import NUMPY_NAMES, torch_keywords


def in_signature_order(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` in the order of the signature, which is how rules tell several tensors apart.

    >>> list(in_signature_order(torch.matmul, {"other": torch.ones(1), "input": torch.ones(1)}))
    ['input', 'other']
    """
    if sum(isinstance(value, torch.Tensor) for value in kwargs.values()) < 2:
        return kwargs
    order = _parameters(op_name(func).base)
    return dict(sorted(kwargs.items(), key=lambda item: order.get(NUMPY_NAMES.get(item[0], item[0]), len(order))))


def first_by_position(func: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that has keywords only, with ``input`` by position, where every handler looks for it.

    Functions written in Python hand it over by position themselves, or have names of their own.

    >>> first_by_position(torch.sum, {"input": 1, "dim": 0})
    ((1,), {'dim': 0})
    """
    named = torch_keywords(kwargs)
    if isinstance(func, FunctionType) or "input" not in named or _parameters(op_name(func).base).get("input") != 0:
        return (), kwargs
    return (named.pop("input"),), named


@cache
def _parameters(base: str) -> dict[str, int]:
    """Say where each parameter of an operation of torch stands, over all of its signatures."""
    packet = getattr(torch.ops.aten, base, None)
    places: dict[str, int] = {}
    for overload in packet.overloads() if packet is not None else ():
        for place, argument in enumerate(schema_of(getattr(packet, overload)).arguments):
            name = "input" if argument.name == "self" else argument.name
            places[name] = max(place, places.get(name, 0))
    return places
