"""Hooks on the autograd graph that say when backward reaches a tensor, whatever users do to the tensor afterwards.

Also what keeps hooks out of the graphs of ``torch.compile``, which breaks its graph at them and runs them as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx._nested_values import find_tensors
from phalanx.tensor import DTensor

F = TypeVar("F", bound=Callable[..., Any])
_CALLS = "phalanx.fsdp"
"""Where a node of the graph keeps what is called at it, in order."""


def outside_of_graphs(function: F) -> F:
    """Return ``function`` so that ``torch.compile`` leaves it alone; while nobody has loaded it, nothing is done."""

    disabled: list[F] = []  # made once: that takes longer than most of what is called

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]  # the same arguments and results


def before_backward(value: Any, reached: Callable[[], None], *, first: bool = False) -> int:
    """Call ``reached`` when backward has all gradients of a tensor in ``value``; return how many tensors it watches.

    The hook is on the node that made the tensor's memory: a write in place to the tensor, or to a view of it, makes new
    nodes behind that one and leaves it where it is. ``first``: before the others of that node. A module's input is
    mostly the output of another, and what the one ends with is to come before what the other begins with. Then leaves
    are not watched: autograd may deliver their gradients before those of the module's parameters.
    """
    count = 0
    for tensor in find_tensors(value):
        local = tensor._local if isinstance(tensor, DTensor) else tensor
        if local.requires_grad and not (first and local.is_leaf):
            _hook(local, reached, first)
            count += 1
    return count


def _hook(tensor: Tensor, reached: Callable[[], None], first: bool) -> None:
    base = tensor._base
    node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    if node is None:
        tensor.register_hook(lambda grad: reached())
        return
    kept: Any = node.metadata  # lives as long as the node
    calls: list[Callable[[], None]] | None = kept.get(_CALLS)
    if calls is None:
        calls = kept[_CALLS] = []
        node.register_prehook(partial(_call_all, calls))
    calls.insert(0 if first else len(calls), reached)


def _call_all(calls: list[Callable[[], None]], grads: Any) -> None:
    for call in calls:
        call()
