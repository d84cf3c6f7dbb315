"""Operations without a sharding rule: gather, compute on global tensors, keep the result replicated.

Owns ``run_replicated`` and ``write_out``. Right for any deterministic function of its arguments; arguments that the
function changed are written back to their layout. Random functions never come here (replicas would diverge).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import TracingContext, is_alias_of
from phalanx.tensor.core._copied_views import check_writable, mark_copied_view, written
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._implicit_communication import moved_for
from phalanx.tensor.core._modes import note_fallback
from phalanx.tensor.dispatch._arguments import NeedsPromotion, flatten, promote, run_handler, walk_tensors
from phalanx.tensor.dispatch._distribute import redistribute_input
from phalanx.tensor.layout._placement import REPLICATE
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import OPERATORS, op_name
from phalanx.tensor.redistribute._traced import is_traced


def run_replicated(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on global tensors; every tensor in the result is replicated."""
    kwargs = dict(kwargs) if kwargs else {}
    out = kwargs.pop("out", None)
    if out is not None:
        return write_out(run_handler(func, args, kwargs), out)
    name = op_name(func)
    try:
        structure = flatten(args, kwargs)
    except NeedsPromotion:
        return run_handler(func, *promote(name, args, kwargs))
    tensors = structure.tensors
    if TracingContext.try_get() is not None and not all(is_traced(t._local) for t in tensors):
        raise NotImplementedError(f"{name.base} on a DTensor would communicate while torch.compile traces")
    if any(not t._spec.is_replicated for t in tensors):
        note_fallback(name.base, [t._spec for t in tensors])
    gathered = [redistribute_input(t, t._spec.replicated, name.base) for t in tensors]
    versions = [_version(full) for full in gathered]
    local_args, local_kwargs = structure.rebuild(gathered)
    result = func(*local_args, **local_kwargs)
    written = {i for i, full in enumerate(gathered) if _version(full) != versions[i]}
    written |= _silent_writes(name.base, args, tensors)
    for index in written:
        write_back(tensors[index], gathered[index], name.base)
    mesh = tensors[0]._spec.mesh

    def lift(tensor: Tensor) -> Tensor:
        for original, full in zip(tensors, gathered, strict=True):
            if tensor is full:
                return original
        wrapped = wrap(tensor, Spec.of(mesh, (REPLICATE,) * mesh.ndim, tensor.shape, tensor.dtype))
        for base, full in zip(tensors, gathered, strict=True):
            copied = full is not base._local or base._copied_view is not None
            if copied and is_alias_of(tensor, full):
                mark_copied_view(wrapped, base, name.base, () if kwargs else tuple(args))
        return wrapped

    return walk_tensors(result, lift)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _silent_writes(name: str, args: Any, tensors: list[DTensor]) -> set[int]:
    """Say which of ``tensors`` the operator wrote to without raising their version."""
    return {
        index
        for position in OPERATORS[name].writes
        if position < len(args)
        for index, tensor in enumerate(tensors)
        if args[position] is tensor
    }


def write_back(tensor: DTensor, full: Tensor, op: str) -> None:
    """Put the changed copy ``full`` back into ``tensor``, in its layout."""
    check_writable(tensor, op)
    spec = tensor._spec
    if tuple(full.shape) != tuple(spec.shape):
        raise RuntimeError(f"{op} changed the shape of {spec!r} to {tuple(full.shape)}: not supported on a DTensor")
    if full is tensor._local:
        written(tensor)
        return
    tensor._local.copy_(moved_for(op, full, spec.replicated.with_dtype(full.dtype), spec.with_dtype(full.dtype)))
    written(tensor)


def write_out(result: Any, out: Any) -> Any:
    """``out=``: copy results into the given DTensors, in their layouts."""
    if isinstance(out, Tensor):
        if not isinstance(out, DTensor):
            raise RuntimeError(
                f"out= is a plain tensor of shape {tuple(out.shape)} where the arguments are DTensors: distribute it, "
                f"or use the tensor that is returned"
            )
        if out.shape != result.shape:
            raise RuntimeError(
                f"out= has shape {tuple(out.shape)}, the result {tuple(result.shape)}: a DTensor is not resized"
            )
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"out= has dtype {out.dtype}, to which {result.dtype} cannot be cast")
        if torch.is_grad_enabled() and (out.requires_grad or result.requires_grad):
            raise RuntimeError("functions with out= do not support gradients")
        run_handler(torch.Tensor.copy_, (out, result), {})
        return out
    filled = [write_out(one, target) for one, target in zip(result, out, strict=True)]
    return type(result)(filled) if type(result).__module__ == "torch.return_types" else type(out)(filled)
