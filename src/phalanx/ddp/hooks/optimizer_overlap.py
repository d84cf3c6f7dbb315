"""Steps optimizers inside backward: each bucket's parameters are updated while later buckets are still under way.

Two ways in. ``fused_optimizer_hook`` runs any ``torch.optim`` optimizer on the parameters given (or all), one
optimizer per parameter. ``take_over`` adopts optimizers that were attached to parameters to be stepped by autograd
itself, which would otherwise step on gradients that are not reduced yet.

Limit: an update that has run cannot be taken back; after ``PeerLost`` inside such a backward, restore the parameters
from a peer or a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._torch_faults import check_fused
from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.buckets._local_tensors import local_part
from phalanx.ddp.hooks.default import Hook, allreduce_hook

ATTACHED = "_in_backward_optimizers"
Update = Callable[[nn.Parameter, Tensor], None]


def hook_then_optimizer(hook: Hook, update: Update, params: Iterable[nn.Parameter] | None = None) -> Hook:
    """``hook``, then ``update(param, gradient)`` for each parameter of the bucket (of ``params``, if given)."""
    wanted = None if params is None else {id(param) for param in params}

    def reduce_then_step(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        def step(future: torch.futures.Future[Tensor]) -> Tensor:
            buffer = future.value()
            bucket.set_buffer(buffer)
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if wanted is None or id(param) in wanted:
                    update(param, gradient)
            return buffer

        return hook(state, bucket).then(step)

    return reduce_then_step


class PerParameterOptimizer:
    """Any optimizer class, one instance per parameter, stepped one parameter at a time."""

    def __init__(self, optim: type[torch.optim.Optimizer], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._optim, self._args, self._kwargs = optim, args, kwargs
        self._optimizers: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def step_param(self, param: nn.Parameter, gradient: Tensor) -> None:
        known = self._optimizers.get(id(param))
        if known is None:
            optimizer = self._optim([param], *self._args, **self._kwargs)
            check_fused(optimizer, "an optimizer in backward")
            known = self._optimizers[id(param)] = (param, optimizer)
        _step_with(known[1], param, gradient)


def _step_with(optimizer: torch.optim.Optimizer, param: nn.Parameter, gradient: Tensor) -> None:
    part = local_part(param)
    before, part.grad = part.grad, gradient.to(part.dtype)
    try:
        optimizer.step()
    finally:
        part.grad = before


def fused_optimizer_hook(
    optim: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter] | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Hook:
    """Mean over the ranks, then ``optim`` on each parameter; the state of the hook is the group."""
    if not (isinstance(optim, type) and issubclass(optim, torch.optim.Optimizer)):
        raise RuntimeError(f"{optim!r} is not an optimizer class; expected a subclass of torch.optim.Optimizer")
    runner = PerParameterOptimizer(optim, args, kwargs)
    return hook_then_optimizer(allreduce_hook, runner.step_param, params)


def apply_optimizer_in_backward(
    optim: type[torch.optim.Optimizer], params: Iterable[nn.Parameter], **kwargs: Any
) -> None:
    """Attach an optimizer to each parameter, to be stepped inside backward once the gradient is reduced.

    Call it before the first forward of the wrapper. Gradients of these parameters are None after backward.
    """
    for param in params:
        attached = getattr(param, ATTACHED, [])
        optimizer = optim([param], **kwargs)
        check_fused(optimizer, "apply_optimizer_in_backward")
        setattr(param, ATTACHED, [*attached, optimizer])


def take_over(params: Iterable[nn.Parameter]) -> bool:
    """Return whether any parameter has attached optimizers; if so, autograd no longer steps them by itself."""
    attached = [param for param in params if hasattr(param, ATTACHED)]
    for param in attached:
        for optimizer in getattr(param, ATTACHED):
            check_fused(optimizer, "an optimizer in backward")
    # PyTorch's way of attaching registers hooks that would step on local gradients; it keeps their handles there.
    source = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = getattr(source, "param_to_optim_hook_handle_map", {})
    for param in attached:
        for handle in handles.get(param, []):
            handle.remove()
    return bool(attached)


def _step_attached(param: nn.Parameter, gradient: Tensor) -> None:
    for optimizer in getattr(param, ATTACHED, ()):
        _step_with(optimizer, param, gradient)


in_backward_hook = hook_then_optimizer(allreduce_hook, _step_attached)


def clear_gradients(params: Iterable[nn.Parameter]) -> None:
    """Gradients that were used up within backward are not kept."""
    for param in params:
        if hasattr(param, ATTACHED):
            param.grad = None
