"""Walks what goes into and comes out of ``forward``: finds tensors, moves them, casts them.

Containers are rebuilt only where something inside changed; unknown objects (and remote references) pass untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import tree_leaves


def is_remote_reference(value: object) -> bool:
    """Return whether it is an RRef, known by its methods so that the RPC package need not be there."""
    return all(hasattr(type(value), name) for name in ("is_owner", "local_value", "to_here"))


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, dicts, dataclasses, registered pytrees and owned remote
    references."""
    if isinstance(value, Tensor):
        yield value
    elif is_remote_reference(value):
        if value.is_owner():
            yield from find_tensors(value.local_value())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from find_tensors(getattr(value, part.name, None))
    else:
        leaves = tree_leaves(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            for leaf in leaves:
                yield from find_tensors(leaf)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the same structure with ``function`` applied to its tensors; objects without tensors are returned as they
    are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is value[key] for key in value):
            return value
        mapping = copy.copy(value)
        mapping.update(changed)
        return mapping
    if is_dataclass(value) and not isinstance(value, type):
        rebuilt: Any = copy.copy(value)
        for part in fields(value):
            item = getattr(value, part.name, None)
            # object.__setattr__ reaches frozen dataclasses too; the copy is nobody else's yet.
            object.__setattr__(rebuilt, part.name, map_tensors(function, item))
        return rebuilt
    return value


def cast_floating(dtype: torch.dtype | None, value: Any) -> Any:
    """Floating tensors cast to ``dtype``; None leaves all as it is."""
    if dtype is None:
        return value
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def move_to(device: torch.device, value: Any) -> Any:
    return map_tensors(lambda t: t.to(device, non_blocking=True), value)
