"""Running torch's Python-written functions *through*: their body runs, and the operations inside are intercepted.

Owns ``inlined`` and ``run_inlined``. Such a function begins with a check for overrides that would hand it straight back
to us, so it is run from a copy whose module globals answer "no override" to that check; everything it calls still
checks for real.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.core._modes import settings
from phalanx.tensor.dispatch._arguments import promote
from phalanx.tensor.ops._registry import op_name

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no_override(*args: object) -> bool:
    return False


class _Torch:
    """``torch`` for functions that ask ``torch.overrides``, as those of torch.nn.init do."""

    overrides = types.SimpleNamespace(**dict.fromkeys(_CHECKS, _no_override))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def inlined(func: Any) -> Callable[..., Any] | None:
    """``func`` with its own check for overrides switched off; None if it is not a Python function that has one."""
    inner = getattr(func, "__wrapped__", func)
    if not isinstance(inner, types.FunctionType):
        return None
    if inner is not func:
        return inner  # the check was in the wrapper
    if "super" in inner.__code__.co_names:
        return None  # it calls the method it overrides, which torch reports under the overriding name
    names = [name for name in _CHECKS if name in inner.__code__.co_names]
    if not names:
        return None  # it is checked by something it calls, which would bring it back here
    scope = {**inner.__globals__, **dict.fromkeys(names, _no_override)}
    if "overrides" in inner.__code__.co_names:
        scope["torch"] = _Torch()
    copy = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


def run_inlined(body: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a Python function's body; plain tensors that it makes count as replicas, those it was given do not."""
    kwargs = kwargs or {}
    if not settings.implicit_replication and any(_is_plain(a) for a in (*args, *kwargs.values())):
        args, kwargs = promote(op_name(func), args, kwargs)
    previous, settings.implicit_replication = settings.implicit_replication, True
    try:
        return body(*args, **kwargs)
    finally:
        settings.implicit_replication = previous


def _is_plain(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_is_plain, arg))
    return isinstance(arg, Tensor) and type(arg) is not DTensor
