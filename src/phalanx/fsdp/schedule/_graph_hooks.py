"""Hooks on the autograd graph that say when backward reaches a tensor, whatever users do to the tensor afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from phalanx._nested_values import find_tensors
from phalanx.tensor import DTensor


def before_backward(value: Any, reached: Callable[[], None]) -> int:
    """Call ``reached`` when backward has all gradients of a tensor in ``value``; return how many tensors it watches.

    The hook is on the node that made the tensor's memory: a write in place to the tensor, or to a view of it, makes new
    nodes behind that one and leaves it where it is.
    """
    count = 0
    for tensor in find_tensors(value):
        local = tensor._local if isinstance(tensor, DTensor) else tensor
        if local.requires_grad:
            _hook(local, reached)
            count += 1
    return count


def _hook(tensor: Tensor, reached: Callable[[], None]) -> None:
    def on_tensor(grad: Tensor) -> None:
        reached()

    def on_node(grads: tuple[Tensor, ...]) -> None:
        reached()

    base = tensor._base
    node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    if node is None:
        tensor.register_hook(on_tensor)
    else:
        node.register_prehook(on_node)
