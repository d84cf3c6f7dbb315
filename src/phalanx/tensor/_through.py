"""Running torch's Python-written functions *through*: their body runs, and the operations inside are intercepted.

Owns ``through``. Such a function begins with a check for overrides that would hand it straight back to us, so it is run
from a copy whose module globals answer "no override" to that check; everything it calls still checks for real.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _no_override(*args: object) -> bool:
    return False


def through(func: Any) -> Callable[..., Any] | None:
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
    copy = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
