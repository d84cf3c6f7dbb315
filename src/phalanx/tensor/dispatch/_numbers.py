"""0-d tensors where torch takes a number: ``x[i]``, ``x.repeat(n, 1)``, ``torch.add(x, y, alpha=a)``.

Owns ``with_numbers`` and ``number_of``. Of such a tensor torch takes the value, which may decide about the shape of the
result or about which rank holds it: the whole value is read on every rank before anything is laid out. Where torch also
takes a tensor in that place (``x + t``, ``x.clamp(t)``), it stays one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor.core._dtensor import number_of
from phalanx.tensor.ops._registry import op_name, operator_of
from phalanx.tensor.ops._rule import torch_keywords

_POSITIONS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})  # bool and uint8 are masks


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Read = Callable[[str, Tensor], Any]


def with_numbers(func: Any, args: Any, kwargs: Any) -> _Arguments | None:
    """The arguments with numbers in place of 0-d tensors that stand for them; None if there are none."""
    return _replaced(func, args, kwargs, number_of)


def has_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether there are some; reads none, which might communicate."""
    return _replaced(func, args, kwargs, lambda op, tensor: None) is not None


def _replaced(func: Any, args: Any, kwargs: Any, read: _Read) -> _Arguments | None:
    name = op_name(func).base
    if operator_of(name).indexes:
        key = _plain_key(name, args[1], read)
        return None if key is args[1] else ((args[0], key, *args[2:]), kwargs)
    places = _tensor_places(name)
    if places is None:
        return None
    by_place = [a if i in places else _numbers(name, a, read) for i, a in enumerate(args)]
    named = torch_keywords(kwargs) if kwargs else kwargs
    by_name = {k: v if k in places else _numbers(name, v, read) for k, v in named.items()}
    same = all(map(is_, by_place, args)) and all(by_name[k] is named[k] for k in named)
    return None if same else (tuple(by_place), by_name)


def _plain_key(name: str, key: Any, read: _Read) -> Any:
    if isinstance(key, Tensor):
        return read(name, key) if not key.dim() and key.dtype in _POSITIONS else key
    if type(key) is not tuple or not any(isinstance(k, Tensor) and not k.dim() for k in key):
        return key
    keys = tuple(_plain_key(name, k, read) if isinstance(k, Tensor) else k for k in key)
    return key if all(map(is_, keys, key)) else keys


def _numbers(name: str, value: Any, read: _Read) -> Any:
    if isinstance(value, Tensor):
        return value if value.dim() or value.dtype is torch.bool else read(name, value)
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) and not v.dim() for v in value):
        return type(value)(_numbers(name, v, read) for v in value)
    return value


@cache
def _tensor_places(base: str) -> frozenset[int | str] | None:
    """Positions and names at which some signature of an operation of torch takes a tensor; None: not known."""
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return None
    places: set[int | str] = set()
    for overload in packet.overloads():
        for place, argument in enumerate(getattr(packet, overload)._schema.arguments):
            if "Tensor" in str(argument.type):
                places |= {place, "input" if argument.name == "self" else argument.name}
    return frozenset(places)
