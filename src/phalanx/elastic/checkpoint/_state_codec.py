"""Turns state dicts into JSON plus a list of tensors, and back: what is sent to newcomers and written to disk.

Owns the mapping of nested values to a JSON tree. Nothing is ever pickled: a value of a type that is not listed here
is refused with its path. Tensors that share their memory (tied weights) are listed once. Floats survive exactly
(JSON writes the shortest text that reads back as the same number); integer keys, tuples and numpy scalars survive.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.elastic.checkpoint._save_memory import Staging

Json = Any
"""What ``json.dumps`` takes; too deep a recursion for the type checker."""


class StateTypeError(TypeError):
    """A state dict holds a value that has no safe form outside this process."""


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.known: dict[tuple[Any, ...], int] = {}

    def encode(self, value: Any, path: str) -> Json:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return {"$": "tensor", "i": self._tensor(value, path)}
        if isinstance(value, (tuple, list)):
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if type(value) is list else {"$": "tuple", "v": items}
        if isinstance(value, Mapping):
            pairs = [(key, self.encode(item, f"{path}.{key}")) for key, item in value.items()]
            if all(type(key) is str and key != "$" for key, _ in pairs):
                return dict(pairs)
            return {"$": "dict", "v": [[self.encode(key, f"{path} key"), item] for key, item in pairs]}
        if isinstance(value, (set, frozenset)):
            items = sorted(value)
            return {"$": "set", "v": [self.encode(item, path) for item in items]}
        if isinstance(value, (bytes, bytearray)):
            return {"$": "bytes", "v": base64.b64encode(bytes(value)).decode()}
        if isinstance(value, np.ndarray) and value.dtype != object:
            data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "v": data}
        if isinstance(value, (bool, int, float, str)):  # subclasses, such as numpy.float64 and string enums
            return self.encode(value.item() if isinstance(value, np.generic) else _base(value), path)
        if isinstance(value, np.generic):
            return self.encode(value.item(), path)
        if isinstance(value, (torch.dtype, torch.device)):
            return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}
        raise StateTypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}; a job's state may hold tensors, "
            "numbers, text, bytes, None, arrays, and lists, tuples, sets and dicts of them. "
            "Give the object a state_dict() that returns such values."
        )

    def _tensor(self, tensor: Tensor, path: str) -> int:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise StateTypeError(f"{path} is a {tensor.layout} tensor; a job's state may hold dense tensors only")
        has_memory = tensor.numel() and not tensor.is_meta
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if has_memory else (id(tensor),)
        tensor = tensor.detach()
        if key not in self.known:
            self.known[key] = len(self.tensors)
            self.tensors.append(tensor)
        return self.known[key]


def encode(value: Any, name: str = "state") -> tuple[Json, list[Tensor]]:
    """Return a JSON tree and the tensors that it refers to. The tensors are the live ones, not copies.

    >>> encode({"step": 3, "betas": (0.9, 0.99)})
    ({'step': 3, 'betas': {'$': 'tuple', 'v': [0.9, 0.99]}}, [])
    """
    encoder = _Encoder()
    return encoder.encode(value, name), encoder.tensors


def copy_encoded(value: Any, staging: Staging | None = None) -> tuple[Json, list[Tensor]]:
    """``encode``, with copies in main memory in the place of the tensors: what happens to those later is not seen.

    Tensors on the meta device stay there: they say that their values are elsewhere. Without ``staging`` each copy
    has memory of its own.
    """
    tree, tensors = encode(value)
    if staging is not None:
        return tree, staging.copy(tensors)
    copies = [
        t if t.is_meta else t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for t in tensors
    ]
    return tree, copies


def decode(tree: Json, tensors: Sequence[Tensor]) -> Any:
    """Return the inverse of ``encode``; ``ValueError`` for what ``encode`` cannot have made, whatever it is.

    >>> decode(*encode({"step": 3, 1: (None, float("inf"))}))
    {'step': 3, 1: (None, inf)}
    """
    try:
        return _decode(tree, tensors)
    except (
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:  # and RecursionError
        raise ValueError(f"no record of a state ({type(error).__name__}: {error})") from error


def _decode(tree: Json, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind is None:
        return {key: _decode(item, tensors) for key, item in tree.items()}
    value = tree["i"] if kind == "tensor" else tree["v"]
    if kind == "tensor":
        if type(value) is not int or not 0 <= value < len(tensors):
            raise ValueError(f"tensor {value!r} of a state record; there are {len(tensors)}")
        return tensors[value]
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value}
    if kind in ("tuple", "set"):
        items = [_decode(item, tensors) for item in value]
        return tuple(items) if kind == "tuple" else set(items)
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind == "array":
        return _array(tree["dtype"], tree["shape"], base64.b64decode(value, validate=True))
    if kind == "dtype":
        return dtype_from_name(value)
    if kind == "device":
        return torch.device(str(value))
    raise ValueError(f"unknown kind {kind!r} in a state record; it was written by another release")


def _array(dtype: Json, shape: Json, data: bytes) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"an array of dtype {dtype!r} and shape {shape!r} in a state record")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"an array of shape {shape!r} in a state record")
    kind = np.dtype(dtype)
    count = len(data) // kind.itemsize if kind.itemsize else 0
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype=kind, count=count).reshape(shape).copy()
    return array


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r} in a state record")
    return dtype


def _base(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    raise AssertionError("the caller has checked the type")
