"""Tracers meet DTensors: refused, because they would record this rank's part as a constant.

Owns the check; ``DTensor`` asks only while some dispatch mode is active.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def refuse_tracing(func: Any) -> None:
    """Raise inside a tracer: what it records would be wrong on every other rank and for every other input."""
    for mode in _get_current_dispatch_mode_stack():
        if type(mode).__name__ in ("ProxyTorchDispatchMode", "FakeTensorMode", "FunctionalTensorMode"):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} on a DTensor inside make_fx, torch.export or torch.compile: "
                f"tracing DTensors is not supported"
            )
