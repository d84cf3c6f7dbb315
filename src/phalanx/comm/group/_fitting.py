"""Gives collectives to callers inside the library that make their tensors to fit, and so need no look at them.

Owns ``gather_fitting``, ``exchange_fitting``, ``reduce_scatter_fitting`` and ``all_reduce_fitting``: each gives the
collective of one group as a function, prepared once and called often. The caller answers for contiguous, non-empty
tensors on strided memory, of one dtype in ``MOVED`` (in ``PLAIN[op]`` for a reduction) and of the sizes that the
collective takes. Everything else is as in the method of ``Group``: a group that has ended raises, observers are told,
ranks are compared.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from phalanx.comm.group import _observe
from phalanx.comm.group._group import Group
from phalanx.comm.transports._interface import ReduceOp, Work

Fitting = Callable[..., Work]  # called as the method of ``Group``, with ``async_op`` always said


def gather_fitting(group: Group) -> Fitting:
    """``group.all_gather_into_tensor``."""
    collective = group._transport.all_gather_into_tensor

    def gather(output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        if group._guarded or _observe._observers:
            group._enter("all_gather_into_tensor", (output,))
        return collective(output, tensor, async_op=async_op)

    return gather


def exchange_fitting(group: Group) -> Fitting:
    """``group.all_to_all_single`` without splits, of two tensors of one shape."""
    collective = group._transport.all_to_all_flat

    def exchange(output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        if group._guarded or _observe._observers:
            group._enter("all_to_all_single", (output, tensor))
        return collective(output, tensor, async_op=async_op)

    return exchange


def reduce_scatter_fitting(group: Group, op: ReduceOp) -> Fitting:
    """``group.reduce_scatter_tensor`` by ``op``."""
    collective = group._transport.reduce_scatter_tensor

    def reduce_scatter(output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        if group._guarded or _observe._observers:
            group._enter("reduce_scatter_tensor", (tensor,), op)
        return collective(output, tensor, op, async_op=async_op)

    return reduce_scatter


def all_reduce_fitting(group: Group, op: ReduceOp) -> Fitting:
    """``group.all_reduce`` by ``op``."""
    collective = group._transport.all_reduce

    def all_reduce(tensor: Tensor, *, async_op: bool) -> Work:
        if group._guarded or _observe._observers:
            group._enter("all_reduce", (tensor,), op)
        return collective(tensor, op, async_op=async_op)

    return all_reduce
