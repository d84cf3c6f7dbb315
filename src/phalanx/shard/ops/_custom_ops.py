"""Registers operations of users: for every sharded tensor, or for one kind of spec.

Module state on purpose: registration is by decorator, at import, as in torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from phalanx.shard.tensor._sharding_spec import ShardingSpec

Implementation = Callable[..., Any]

_for_all: dict[Any, Implementation] = {}
_for_spec: dict[type[ShardingSpec], dict[Any, Implementation]] = {}


def custom_sharded_op_impl(func: Any) -> Callable[[Implementation], Implementation]:
    """Use the decorated ``f(types, args, kwargs, process_group)`` for ``func`` on sharded tensors.

    >>> @custom_sharded_op_impl(torch.asin)            # doctest: +SKIP
    ... def asin(types, args, kwargs, process_group): ...
    """
    return _register(_for_all, func)


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Any
) -> Callable[[Implementation], Implementation]:
    """Like ``custom_sharded_op_impl``, for tensors sharded by this class of spec only."""
    return _register(_for_spec.setdefault(sharding_spec_class, {}), func)


def _register(table: dict[Any, Implementation], func: Any) -> Callable[[Implementation], Implementation]:
    def decorate(implementation: Implementation) -> Implementation:
        if not callable(implementation):
            raise TypeError(f"the implementation of {func} must be callable, got {type(implementation).__name__}")
        signature = inspect.signature(implementation)
        if not _takes_four(signature):
            raise TypeError(
                f"the implementation of {func} for sharded tensors is called with (types, args, kwargs, "
                f"process_group), but takes {signature}"
            )
        table[func] = implementation
        return implementation

    return decorate


def _takes_four(signature: inspect.Signature) -> bool:
    try:
        signature.bind(None, None, None, None)
    except TypeError:
        return False
    return True


def custom_implementation(func: Any, spec: ShardingSpec) -> Implementation | None:
    """Return what a user registered: for all first, then for the class of the spec."""
    return _for_all.get(func) or _for_spec.get(type(spec), {}).get(func)
