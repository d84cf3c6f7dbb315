"""What random functions on DTensors share: how their arguments are read and checked, how a tensor is drawn or written.

Owns no distribution. A check raises ``RuntimeError``, as torch does; one that looks at values is agreed on by all
ranks, so that none goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor.core._copied_views import check_writable, written
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.core._implicit_communication import check_collective, moved_for
from phalanx.tensor.dispatch._arguments import promote
from phalanx.tensor.layout._placement import Shard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import op_name
from phalanx.tensor.random import _philox
from phalanx.tensor.random._state import check_not_traced
from phalanx.tensor.random._traced_draws import draw_like

Handler = Callable[[Any, Any, Any], Any]

FLOATS = frozenset(_philox.DIGITS)
COMPLEX = frozenset([torch.complex32, torch.complex64, torch.complex128])
INTEGERS = frozenset(
    [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)


def option(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else (kwargs or {}).get(name, default)


def require(good: bool, told: str) -> None:
    if not good:
        raise RuntimeError(told)


def require_dtype(name: str, dtype: torch.dtype, taken: Collection[torch.dtype]) -> None:
    if dtype not in taken:
        kinds = ((FLOATS, "floats"), (INTEGERS, "integers"), (COMPLEX, "complex numbers"))
        told = ", ".join(told for kind, told in kinds if kind <= frozenset(taken))
        raise RuntimeError(f"{name} on a DTensor takes {told}, not {dtype}")


def require_everywhere(op: str, good: Tensor, spec: Spec, told: str) -> None:
    """Raise on every rank if ``good``, a local tensor laid out as ``spec``, is false anywhere on any."""
    check_not_traced(spec.mesh)
    flag = (~good).any().to(torch.int64).reshape(1)
    cut = [axis for axis, p in enumerate(spec.placements) if isinstance(p, Shard) and spec.mesh.shape[axis] > 1]
    if cut:
        check_collective(op, f"asks every rank whether its part of {spec!r} is good", 8 * len(cut))
    for axis in cut:
        spec.mesh.get_group(axis).all_reduce(flag, op="max")
    require(not bool(flag.item()), told)


def check_generator(kwargs: dict[str, Any]) -> None:
    """Take ``generator`` out of the keywords; it must be None."""
    if kwargs.pop("generator", None) is not None:
        raise NotImplementedError("generator= on a DTensor: use phalanx.tensor.manual_seed(seed, mesh)")


def with_distributed_arguments(handler: Handler) -> Handler:
    """With the tensor first, not a keyword; plain tensors beside DTensors are refused or, where allowed, replicated."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        options = dict(kwargs or {})
        for name in ("input", "self"):
            if not args and name in options:
                args = (options.pop(name),)
        tensors = [v for v in (*args, *options.values()) if isinstance(v, Tensor) and v.ndim]
        if any(type(t) is not DTensor or t._spec.mesh != tensors[0]._spec.mesh for t in tensors):  # type: ignore[attr-defined]  # DTensors
            args, options = promote(op_name(func), args, options)
        return handler(func, args, options)

    return run


def drawn(tensor: DTensor, make: _philox.Make, dtype: torch.dtype | None = None) -> Tensor:
    """Return a local tensor of drawn values in the layout of ``tensor``, replicated where it is partial."""
    spec = tensor._spec.cotangent.with_dtype(dtype or tensor.dtype)
    return draw_like(tensor, spec, make)


def write(tensor: DTensor, values: Tensor, op: str) -> DTensor:
    """Put ``values`` (replicated where ``tensor`` is partial) into ``tensor``."""
    if tensor._copied_view is not None:
        check_writable(tensor, op)
    spec = tensor._spec
    tensor._local.copy_(moved_for(op, values, spec.cotangent, spec))
    written(tensor)
    return tensor
