"""Sums over mesh axes inside of the graph: of a partial tensor, and of the gradients of replicas.

Owns both. They are each other's backward: a sum on the way forward leaves the gradient as it is, and where that is
itself differentiated, what comes back is summed; a replica that met different work on each rank is left as it is, and
its gradient is summed.

Both put a hook on an alias of the tensor, which costs a third of an autograd node written in Python. Only where the
gradient is itself differentiated (create_graph) does the hook make such a node. Nobody else sees the alias, so that
all aliases of one place share their hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import register_hook_dict
from phalanx.comm import Group
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._log import listening, log_collectives
from phalanx.tensor.redistribute._plan import RedistributeStep
from phalanx.tensor.redistribute._steps import group_of, reduction_in_place
from phalanx.tensor.redistribute._traced import TRACED, is_traced, traced_all_reduce

Hooks = OrderedDict[int, Callable[[Tensor], Tensor | None]]
Sums = tuple[Hooks, Callable[..., Any]]


def hooked(local: Tensor, hooks: Hooks) -> Tensor:
    """``local`` itself, with hooks on its gradient."""
    alias = local.view_as(local)
    # what register_hook does, without making a handle to remove the hook by
    alias._backward_hooks = hooks
    register_hook_dict(alias.grad_fn)(alias)
    return alias


def sums_over(step: RedistributeStep) -> Sums:
    """Say what ``sum_partial`` needs for a step that sums, made once for each."""
    return OrderedDict({0: partial(_pass_gradient, (group_of(step),))}), reduction_in_place(step)


def sum_partial(local: Tensor, sums: Sums) -> Tensor:
    """Return the sum of the ranks' ``local``, contiguous. A copy, written to behind the back of the graph."""
    hooks, all_reduce = sums
    total = hooked(local, hooks).clone(memory_format=torch.contiguous_format)
    all_reduce(total.detach(), async_op=False)
    return total


def _pass_gradient(groups: tuple[Group, ...], grad: Tensor | None) -> Tensor | None:
    if grad is None:  # as some operations say that theirs is zero, on every rank
        return None
    grad = grad.contiguous()
    return _applied(grad, groups, False) if torch.is_grad_enabled() and grad.requires_grad else grad


def summing_hooks(spec: Spec, axes: tuple[int, ...]) -> Hooks:
    """Hooks that sum the gradient over mesh axes, made once for each layout."""
    found: Hooks | None = spec.variants.get(("sum", axes))
    if found is None:
        groups = tuple(spec.mesh.get_group(axis) for axis in axes)
        found = spec.variants["sum", axes] = OrderedDict()
        found[0] = partial(_first_sum, spec, groups, found)
    return found


def _first_sum(spec: Spec, groups: tuple[Group, ...], hooks: Hooks, grad: Tensor | None) -> Tensor | None:
    """Logs the sum and leaves its place to ``_sum_gradient``."""
    if grad is None or is_traced(grad):
        return _sum_gradient(groups, grad)
    hooks[0] = partial(_sum_gradient, groups)
    with listening() as heard:
        total = _sum_gradient(groups, grad)
    log_collectives("gradient of", spec, heard)
    return total


def reduce_gradient(tensor: Any, local: Tensor, hooks: Hooks, axes: tuple[int, ...]) -> Tensor:
    """``local`` itself; its gradient is summed over mesh ``axes`` (by ``hooks``) where replicas did different work.

    Operations on one ``tensor`` share one alias of its local: autograd adds up their gradients, which are then summed
    over the ranks once. The alias is good for as long as the local has its memory and its place in the graph.
    """
    state = (local._version, local.is_leaf, 0 if type(local) in TRACED else local.data_ptr())
    known = tensor._alias
    if known is not None and known[1] is hooks and known[2] is local and known[3] == state:
        shared: Tensor = known[0]
        return shared
    origin = tensor._gathered
    alias = None if origin is None or origin.local is not local else origin.summed(axes)
    if alias is None:
        alias = hooked(local, hooks)
    tensor._alias = (alias, hooks, local, state)
    return alias


def _sum_gradient(groups: tuple[Group, ...], grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    if torch.is_grad_enabled() and grad.requires_grad:
        return _applied(grad, groups, True)
    return _sum_over(grad, groups)


class _SumOver(torch.autograd.Function):
    """Sum over groups one way, identity the other."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, groups: tuple[Group, ...], sums: bool) -> Tensor:
        ctx.groups, ctx.sums = groups, sums
        return _sum_over(local, groups) if sums else local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _applied(grads[0], ctx.groups, not ctx.sums), None, None


def _applied(local: Tensor, groups: tuple[Group, ...], sums: bool) -> Tensor:
    apply: Any = _SumOver.apply
    result: Tensor = apply(local, groups, sums)
    return result


def _sum_over(local: Tensor, groups: tuple[Group, ...]) -> Tensor:
    if is_traced(local):
        for group in groups:
            local = traced_all_reduce(local, group)
        return local
    total = local.clone(memory_format=torch.contiguous_format)
    for group in groups:
        group.all_reduce(total)
    return total
