"""Which handler runs a torch function on DTensors.

Owns ``find_handler``, asked once for each function. In this order: a refusal; a handler that the table of operators
names; the body of a Python function, in which every call is intercepted; a sharding rule; computing replicated.

A tracer records what happens to this rank's local tensor, so inside ``torch.jit.trace`` every operation on a DTensor
raises, and every collective (which no trace can hold). Calls outside of a trace pay nothing for that: the remembered
handlers are dropped when a trace begins, and those found meanwhile look for it.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.nn.functional as F

from phalanx import comm
from phalanx._torch_private import get_tracing_state, operations
from phalanx.tensor.core._tracing import handlers
from phalanx.tensor.dispatch import _assembled, _attributes, _autograd, _composite, _extremes, _foreach
from phalanx.tensor.dispatch._fallback import run_replicated
from phalanx.tensor.dispatch._inline_python import inlined, run_inlined
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.ops._registry import OPERATORS, OpName, op_name
from phalanx.tensor.ops._rule import Operator
from phalanx.tensor.random import _dropout, _ops
from phalanx.tensor.random._drawing import with_distributed_arguments

Handler = Callable[[Any, Any, Any], Any]

_MODULES: dict[str, Any] = {
    "assembled": _assembled,
    "autograd": _autograd,
    "composite": _composite,
    "dropout": _dropout,
    "extremes": _extremes,
    "foreach": _foreach,
    "attributes": _attributes,
    "random": _ops,
}
_RANDOM = (_dropout, _ops)
_NO_PYTHON = (
    _assembled,
    _composite,
    _extremes,
    *_RANDOM,
)  # a Python function of such a name calls the one that is meant

# Libraries of operations that communicate, whose functions do not say where they come from.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::")


def find_handler(func: Any) -> Handler:
    """Decide once how a torch function is handled."""
    if is_overload_of_torch(func):
        handlers[func] = _as_packet(func.overloadpacket)
        return handlers[func]  # type: ignore[no-any-return]  # a handler
    name = op_name(func)
    operator = OPERATORS[name.base]
    why = _refusal(func, name, operator)
    handler = _named_handler(func, name, operator) if why is None else _refuse(why)
    if handler is None:
        is_python = isinstance(func, types.FunctionType) or hasattr(func, "__wrapped__")
        body = inlined(func) if is_python else None
        if body is not None:
            handler = functools.partial(run_inlined, body)
        else:
            handler = run_replicated if operator.rule is None else run_rule
    handlers[func] = handler
    if not _num_traces:
        return handler
    handlers.pop(func, None)
    return _unless_traced(handler)


def is_overload_of_torch(func: Any) -> bool:
    """Return whether ``func`` is one form of a function of torch itself, such as ``torch.ops.aten.squeeze_.dim``."""
    return isinstance(func, operations.OpOverload) and func.namespace == "aten"


def _as_packet(packet: Any) -> Handler:
    """Make what runs an overload: its function, which has a name in the table and finds the overload by arguments."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        return (handlers.get(packet) or find_handler(packet))(packet, args, kwargs)

    return handler


def _named_handler(func: Any, name: OpName, operator: Operator) -> Handler | None:
    """Find the handler that the table names for this form of the operator; None: no handler comes before the rule."""
    if name.base.startswith(_foreach.PREFIX):
        return _foreach.list_handler(name.base)
    if name.in_place and operator.in_place:
        return handler_called(operator.in_place)[0]
    if is_functional(func, operator):
        return handler_called(operator.functional)[0]
    if not operator.handler:
        return None
    handler, module = handler_called(operator.handler)
    if module in _NO_PYTHON and isinstance(func, types.FunctionType) and inlined(func) is not None:
        return None  # its body is run, and what that calls comes here
    return with_distributed_arguments(handler) if module in _RANDOM else handler


def is_functional(func: Any, operator: Operator) -> bool:
    """Return whether ``func`` is the function of ``torch.nn.functional`` that has a handler of its own there."""
    return bool(operator.functional) and func is getattr(F, operator.name, None)


def handler_called(key: str) -> tuple[Handler, Any]:
    """Find the handler that the table calls ``module.function``, and its module."""
    module, _, function = key.partition(".")
    return getattr(_MODULES[module], function), _MODULES[module]


def _refusal(func: Any, name: OpName, operator: Operator) -> str | None:
    """Say why ``func`` takes no DTensors; None: it does."""
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed") or name.base.startswith(_COLLECTIVES):
        return "torch.distributed functions take this rank's part: use to_local()"
    if type(func).__name__ in ("ScriptFunction", "ScriptMethod"):
        return "compiled functions hold plain tensors and are not distributed; call the function itself"
    if (name.base.startswith("_nested_") and not operator.handler) or name.base.endswith("to_padded_tensor"):
        return "nested tensors are not distributed; make one of to_local() or full_tensor()"
    return (operator.in_place_refused if name.in_place else "") or operator.refused or None


def _refuse(reason: str) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError(f"{getattr(func, '__name__', func)} on a DTensor: {reason}")

    return handler


# ---- while a trace is recorded

_lock = threading.Lock()
_num_traces = 0  # of all threads: while there are some, handlers are not remembered


def _unless_traced(handler: Handler) -> Handler:
    """Make what is called in place of ``handler`` while some thread is inside ``torch.jit.trace``."""

    def check(func: Any, args: Any, kwargs: Any) -> Any:
        if get_tracing_state() is not None:
            refuse_trace(f"{getattr(func, '__name__', func)} on a DTensor")
        return handler(func, args, kwargs)

    return check


def refuse_trace(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} inside torch.jit: it would record this rank's part. "
        f"Trace or script the plain module before it is distributed, or give it full_tensor()"
    )


def _refuse_collective(event: comm.CommEvent) -> None:
    if get_tracing_state() is not None:
        refuse_trace(f"{event.name} of {event.nbytes} B")


@contextmanager
def tracing() -> Iterator[None]:
    global _num_traces
    with _lock:
        _num_traces += 1
    handlers.clear()
    try:
        with comm.observe(_refuse_collective):
            yield
    finally:
        with _lock:
            _num_traces -= 1
