"""What a DTensor says where it is not distributed: to tracers, and to whatever slipped past the interception.

Owns the two refusals. ``DTensor`` asks for tracers only while some dispatch mode is active; see ``_doors.py`` for those
that are none.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def refuse_tracing(func: Any) -> None:
    """Raise inside a tracer: what it records would be wrong on every other rank and for every other input."""
    for mode in _get_current_dispatch_mode_stack():
        if type(mode).__name__ in ("ProxyTorchDispatchMode", "FakeTensorMode", "FunctionalTensorMode"):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} on a DTensor inside make_fx, torch.export or torch.compile: "
                f"tracing DTensors is not supported. Trace the plain module before it is distributed"
            )


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
