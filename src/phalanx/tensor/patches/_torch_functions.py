"""Wrappers of torch's functions that take a DTensor without asking its class, and would see an empty tensor.

Owns the wrappers, which refuse or do right; calls without DTensors pass straight on. ``_install.py`` lists what each is
put around.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx._torch_private import tree_leaves
from phalanx.comm.torch_interop._dcp import Spread
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._modes import under_these_modes
from phalanx.tensor.layout._placement import REPLICATE
from phalanx.tensor.patches._handlers import refuse_trace, tracing


def tracer(plain: Any) -> Any:
    def trace(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            refuse_trace("a DTensor as example input")
        with tracing():
            return plain(*args, **kwargs)

    return trace


def module_compiler(plain: Any) -> Any:
    """``torch.jit`` makes its own module of an ``nn.Module``, whether by tracing or by scripting."""

    def create_script_module(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, tensor in (*nn_module.named_parameters(), *nn_module.named_buffers()):
            if isinstance(tensor, DTensor):
                refuse_trace(f"{name}, a DTensor, in {type(nn_module).__name__}")
        return plain(nn_module, *args, **kwargs)

    return create_script_module


def packer(plain: Any) -> Any:
    def to_dlpack(tensor: Any) -> Any:
        return plain(tensor._whole() if isinstance(tensor, Spread) else tensor)

    return to_dlpack


def edge_maker(plain: Any) -> Any:
    def get_gradient_edge(tensor: Any) -> Any:
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                f"get_gradient_edge of {tensor._spec!r}: the gradient at an edge would be this rank's part of it. "
                f"Give torch.autograd.grad the DTensor itself"
            )
        return plain(tensor)

    return get_gradient_edge


def orthogonalizer(plain: Any) -> Any:
    """Run Muon's iteration on the whole matrix, on every rank: one gather in bfloat16, and the bits of one device.

    It computes in bfloat16, where sums that are cut over the ranks would come out visibly different.
    """

    def orthogonalized(grad: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(grad, DTensor):
            return plain(grad, *args, **kwargs)
        rounded: Any = grad.bfloat16()
        gathered = rounded.redistribute(placements=[REPLICATE] * grad.device_mesh.ndim)
        return wrap(plain(gathered._local, *args, **kwargs), gathered._spec).redistribute(placements=grad.placements)

    return orthogonalized


def grouper(plain: Any) -> Any:
    """Group DTensors by the device of their data: the wrapper is a meta tensor, so torch would group it as one."""

    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        if not any(type(t) is DTensor for tensors in tensorlistlist for t in tensors):
            return plain(tensorlistlist, with_indices)
        return _group(tensorlistlist, with_indices)

    return group


def _group(lists: Any, with_indices: bool) -> dict[Any, Any]:
    kinds = {(t.device, t.dtype) if t is not None else None for t in lists[0]}
    if len(kinds) == 1 and None not in kinds:  # as nearly always
        everything = range(len(lists[0])) if with_indices else ()
        return {kinds.pop(): ([list(tensors) for tensors in lists], list(everything))}
    groups: dict[Any, Any] = {}
    filled = [tensors or [None] * len(lists[0]) for tensors in lists]  # optimizers leave unused lists empty
    for index, column in enumerate(zip(*filled, strict=True)):
        lead = next(t for t in column if t is not None)
        columns, indices = groups.setdefault((lead.device, lead.dtype), ([[] for _ in lists], []))
        for tensors, tensor, given in zip(columns, column, lists, strict=True):
            if given:
                tensors.append(tensor)
        if with_indices:
            indices.append(index)
    return groups


# ---- activation checkpoints
#
# torch keeps the inputs of a checkpointed function as it keeps tensors for backward, so that an outer checkpoint
# recomputes them. The wrapper requires no gradient in autograd's eyes: recomputed, it would have none, so of a DTensor
# torch keeps the local tensor. Recomputation happens in backward, where the user's contexts have ended: the modes of
# forward hold there again, for checkpoints of either kind.


def input_saver(plain: Any) -> Any:
    """Have a checkpoint keep the locals of DTensors and their layouts."""

    def save_inputs(self: Any, *args: Any) -> None:
        kept = [type(a) is DTensor and a._copied_view is None for a in args]
        self.layouts = [a._spec if keep else None for a, keep in zip(args, kept, strict=True)]
        self.recompute_fn = under_these_modes(self.recompute_fn)
        plain(self, *(a._local if keep else a for a, keep in zip(args, kept, strict=True)))

    return save_inputs


def input_giver(plain: Any) -> Any:
    """Have a checkpoint give DTensors back."""

    def get_inputs(self: Any) -> list[Any]:
        found = zip(plain(self), self.layouts, strict=True)
        return [value if spec is None else wrap(value, spec) for value, spec in found]

    return get_inputs


def reentrant_forward(plain: Any) -> Any:
    """Have a reentrant checkpoint recompute under the modes of its forward."""

    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return plain(ctx, under_these_modes(run_function), *args)

    return forward
