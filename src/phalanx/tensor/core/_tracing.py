"""Tracers and DTensors: torch.compile's is let in, others are refused, and so is what arrives below autograd.

Owns ``is_compiling``, ``run_traced``, ``breaking_the_graph``, ``refuse_below`` and the table of handlers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from phalanx._torch_private import current_dispatch_modes, tree_leaves, tree_map_only
from phalanx.tensor.ops._signatures import first_by_position
from phalanx.tensor.redistribute._traced import TRACED

# What runs each torch function; found once for each by ``above.find_handler``.
handlers: dict[Any, Any] = {}


def is_compiling(func: Any, given: Any) -> bool:
    """Return whether torch.compile traces, with DTensors made for it; raise inside of other tracers.

    What those record would be wrong on every other rank and for every other input.
    """
    for mode in current_dispatch_modes():
        if type(mode).__name__ in ("ProxyTorchDispatchMode", "FakeTensorMode", "FunctionalTensorMode"):
            if all(type(t._local) in TRACED for t in tree_leaves(given) if hasattr(t, "_spec")):
                return True
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} on a DTensor inside make_fx, torch.export or torch.compile: "
                f"tracing DTensors is not supported. Trace the plain module before it is distributed"
            )
    return False


def run_traced(above: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on DTensors that torch.compile traces. What raises runs outside of the graphs, and raises there."""
    if not args:
        args, kwargs = first_by_position(func, kwargs)
    args, kwargs = tree_map_only(torch.SymInt, int, (args, kwargs))  # a layout is made of numbers
    name = getattr(func, "__name__", func)
    if any(isinstance(leaf, torch.SymFloat) for leaf in tree_leaves((args, kwargs))):
        raise NotImplementedError(
            f"{name} on DTensors with a Python float that changes from call to call is not traced: compile with "
            f"dynamic=False (one graph for each number), or make it a tensor"
        )
    with breaking_the_graph(name):
        return (handlers.get(func) or above.find_handler(func))(func, args, kwargs)


@contextmanager
def breaking_the_graph(name: Any) -> Iterator[None]:
    """Have torch.compile break its graph at what raises in the block, which is ``name`` traced."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("torch.") or isinstance(error, NotImplementedError):
            raise
        raise NotImplementedError(f"{name} on DTensors cannot be traced: {type(error).__name__}: {error}") from error


def refuse_below(func: Any) -> NoReturn:
    """Raise for ``func`` that reached a DTensor below autograd: the wrapper has no data there."""
    reached = f"{func} reached a DTensor below autograd, where it is not distributed. "
    if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        raise RuntimeError(
            f"{reached}Functions of torch.distributed take plain tensors: use d.redistribute() or d.full_tensor(), "
            f"or give them d.to_local()"
        )
    raise RuntimeError(
        f"{reached}Constructors such as torch.tensor(d) take plain tensors: use d.full_tensor() or d.to_local(). "
        f"In place of torch.func use torch.autograd.grad and torch.autograd.functional"
    )
