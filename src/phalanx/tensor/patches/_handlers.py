"""Which handler runs a torch function on DTensors.

Owns ``find_handler``, asked once for each function. In this order: a refusal; a handler that the table of operators
names; the body of a Python function, in which every call is intercepted; a sharding rule; computing replicated.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from phalanx.tensor.core._dtensor import handlers
from phalanx.tensor.dispatch import _autograd, _composite, _extremes, _foreach, _metadata
from phalanx.tensor.dispatch._fallback import run_replicated
from phalanx.tensor.dispatch._inline_python import run_through, through
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.ops._registry import OpName, is_functional, op_name, operator_of
from phalanx.tensor.ops._rule import Operator
from phalanx.tensor.patches._torch_functions import while_tracing
from phalanx.tensor.random import _dropout, _ops
from phalanx.tensor.random._drawing import with_distributed_arguments

Handler = Callable[[Any, Any, Any], Any]

_MODULES: dict[str, Any] = {
    "autograd": _autograd,
    "composite": _composite,
    "dropout": _dropout,
    "extremes": _extremes,
    "foreach": _foreach,
    "metadata": _metadata,
    "random": _ops,
}
_RANDOM = (_dropout, _ops)
_NO_PYTHON = (_composite, _extremes, *_RANDOM)  # a Python function of such a name calls the one that is meant

# Libraries of operations that communicate, whose functions do not say where they come from.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::")


def find_handler(func: Any) -> Handler:
    """Decide once how a torch function is handled."""
    name = op_name(func)
    operator = operator_of(name.base)
    why = _refusal(func, name, operator)
    handler = _named_handler(func, name, operator) if why is None else _refuse(why)
    if handler is None:
        body = through(func)
        if body is not None:
            handler = functools.partial(run_through, body)
        else:
            handler = run_replicated if operator.rule is None else run_rule
    handlers[func] = handler
    checked = while_tracing(handler)
    if checked is not None:
        handlers.pop(func, None)
        return checked
    return handler


def _named_handler(func: Any, name: OpName, operator: Operator) -> Handler | None:
    """Find the handler that the table names for this form of the operator; None: no handler comes before the rule."""
    of_lists = _foreach.list_handler(name.base)
    if of_lists is not None:
        return of_lists
    if name.in_place and operator.in_place:
        return handler_called(operator.in_place)[0]
    if is_functional(func, operator):
        return handler_called(operator.functional)[0]
    if not operator.handler:
        return None
    handler, module = handler_called(operator.handler)
    if module in _NO_PYTHON and isinstance(func, types.FunctionType):
        return None
    return with_distributed_arguments(handler) if module in _RANDOM else handler


def handler_called(key: str) -> tuple[Handler, Any]:
    """Find the handler that the table calls ``module.function``, and its module."""
    module, _, function = key.partition(".")
    return getattr(_MODULES[module], function), _MODULES[module]


def _refusal(func: Any, name: OpName, operator: Operator) -> str | None:
    """Say why ``func`` takes no DTensors; None: it does."""
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed") or name.base.startswith(
        _COLLECTIVES
    ):
        return "torch.distributed functions take this rank's part: use to_local()"
    if type(func).__name__ in ("ScriptFunction", "ScriptMethod"):
        return "compiled functions hold plain tensors and are not distributed; call the function itself"
    if name.base.startswith("_nested_") or name.base.endswith("to_padded_tensor"):
        return "nested tensors are not distributed; make one of to_local() or full_tensor()"
    return (operator.in_place_refused if name.in_place else "") or operator.refused or None


def _refuse(reason: str) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(f"{getattr(func, '__name__', func)} on a DTensor: {reason}")

    return handler
