"""Operators and methods of DTensors, ``a + b``, ``a.view(...)``, without the detour through torch's argument parser.

Owns those that ``install`` puts on ``DTensor``. Each asks the handler that ``__torch_function__`` would ask. The
inherited way is taken by an operator with anything but two DTensors, by a DTensor whose data is still on its way (a
subclass), and by calls inside a torch function mode or dispatch mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from phalanx._torch_private import num_dispatch_modes, num_function_modes
from phalanx.comm.torch_interop._dynamo import run_as_it_is
from phalanx.tensor.core._dtensor import DTensor, above
from phalanx.tensor.core._tracing import handlers
from phalanx.tensor.dispatch._run import SIMPLE, run_first, run_one, run_pair, run_rule, run_scalar
from phalanx.tensor.ops._registry import OPERATORS


def install() -> None:
    """Give ``DTensor`` its operators and methods."""
    bound: Any = DTensor.__torch_function__
    for call in (bound.__func__, DTensor.redistribute, DTensor.full_tensor, DTensor.to_local, DTensor.from_local):
        run_as_it_is(call.__code__)
    for row in OPERATORS.values():
        for name in row.quick.split():
            inherited = getattr(torch.Tensor, name)
            if name.startswith("__"):  # torch reports an operator as the function
                setattr(DTensor, name, _operator(getattr(torch.Tensor, row.name), inherited))
            else:
                setattr(DTensor, name, _method(inherited))


def _operator(func: Any, inherited: Any) -> Any:
    def operator(self: DTensor, other: Any) -> Any:
        if type(other) is not DTensor or type(self) is not DTensor or num_function_modes() or num_dispatch_modes():
            return inherited(self, other)
        try:
            handler = handlers[func]
        except KeyError:
            handler = above.find_handler(func)
        return run_pair(func, self, other) if handler is run_rule else handler(func, (self, other), None)

    return _hidden_from_compilers(operator)


def _method(func: Any) -> Any:
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not DTensor or num_function_modes() or num_dispatch_modes():
            return func(self, *args, **kwargs)
        try:
            handler = handlers[func]
        except KeyError:
            handler = above.find_handler(func)
        if handler is run_rule and not kwargs:
            if not args:
                return run_one(func, self)
            if len(args) == 1:
                kind = type(args[0])
                if kind in SIMPLE:
                    return run_first(func, self, args)
                if kind is float:
                    return run_scalar(func, self, args[0])
            elif SIMPLE.issuperset(map(type, args)):
                return run_first(func, self, args)
        return handler(func, (self, *args), kwargs)

    return functools.wraps(func)(_hidden_from_compilers(method))


def _hidden_from_compilers(call: Callable[..., Any]) -> Callable[..., Any]:
    # Read by torch.compile: without it, tracing would go on in here and fail with a message that helps nobody.
    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="tracing DTensors is not supported")
    run_as_it_is(call.__code__)
    return call
