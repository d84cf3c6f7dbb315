"""Operators between two DTensors, ``a + b`` and the like, without the detour through torch's argument parser.

Owns the methods that ``install`` puts on ``DTensor``. Each asks the handler that ``__torch_function__`` would ask; with
anything but two DTensors, or inside a torch function mode or dispatch mode, the inherited operator runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.tensor._dtensor import DTensor, _find_handler, _handlers, _num_dispatch_modes

_num_function_modes = torch._C._len_torch_function_stack

# The operator, and the function as which torch reports it.
_OPERATORS = {
    "__add__": torch.Tensor.add,
    "__sub__": torch.Tensor.sub,
    "__mul__": torch.Tensor.mul,
    "__truediv__": torch.Tensor.div,
    "__matmul__": torch.Tensor.matmul,
}


def install() -> None:
    """Give ``DTensor`` its operators."""
    for name, func in _OPERATORS.items():
        setattr(DTensor, name, _operator(func, getattr(torch.Tensor, name)))


def _operator(func: Any, inherited: Any) -> Callable[[DTensor, Any], Any]:
    def operator(self: DTensor, other: Any) -> Any:
        if type(other) is not DTensor or _num_function_modes() or _num_dispatch_modes():
            return inherited(self, other)
        handler = _handlers.get(func) or _find_handler(func)
        return handler(func, (self, other), None)

    # Read by torch.compile: without it, tracing would go on in here and fail with a message that helps nobody.
    operator._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark of torch's
    operator._torchdynamo_disable_msg = "tracing DTensors is not supported"  # type: ignore[attr-defined]  # as above
    return operator
