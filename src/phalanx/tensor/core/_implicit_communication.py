"""Communication on behalf of an operation: the one place that asks whether the user wants to be told of it.

Owns the checks of the communication modes and ``moved_for``, which every operation that moves a tensor for its own
purposes calls. An operation answers for its backward too: where a gradient is needed, its way back is checked when the
operation is called, because then the user's line is known. What the user asks for by name (``redistribute``,
``full_tensor``, ``distribute_tensor``, ``from_local``) never comes here.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from phalanx.tensor.core._modes import ImplicitCommunicationError, settings, user_line
from phalanx.tensor.layout._spec import Spec, on_root
from phalanx.tensor.redistribute._execute import Route, move, route_of, run_plan, turn_back
from phalanx.tensor.redistribute._plan import plan_redistribute


def moved_for(op: str, local: Tensor, source: Spec, target: Spec) -> Tensor:
    """``local`` of a tensor laid out as ``source``, laid out as ``target`` because ``op`` needs it; differentiable."""
    if source is target:
        return local
    route = route_of(plan_redistribute(source, target))
    needs_grad = local.requires_grad and torch.is_grad_enabled()
    if settings.comm != "auto":
        check_move(op, route, needs_grad)
    return move(local, route) if needs_grad else run_plan(local, route.plan)


def check_move(op: str, route: Route, needs_grad: bool) -> None:
    """Refuse or report the move of an operation's input, or of its gradient, as the mode says."""
    plan = route.plan
    if plan.communicates:
        _object(f"{op} needs its input as {plan.target.layout}, it is {plan.source!r}: {plan!r}")
    if needs_grad:
        back = turn_back(route).back
        assert back is not None, "turn_back finds it"
        if back.plan.communicates:
            summed = f" and sums it over mesh axes {route.summed}" if route.summed else ""
            _object(f"backward of {op} brings back the gradient of {plan.source!r}{summed}: {back.plan!r}")


def check_reduction(op: str, spec: Spec, axes: tuple[int, ...]) -> None:
    """Refuse or report the sum of a replica's gradient that backward will have to make."""
    if settings.comm != "auto":
        _object(f"backward of {op} sums the gradient of {spec!r} over mesh axes {axes}: {spec.local_bytes} B")


def check_collective(op: str, what: str, nbytes: int) -> None:
    """Refuse or report a collective that is not the move of a tensor."""
    if settings.comm != "auto":
        _object(f"{op} {what}: {nbytes} B")


def on_one_mesh(op: str, source: Spec, target: Spec) -> tuple[Spec, Spec]:
    """Return both layouts on the larger of their meshes."""
    if source.mesh == target.mesh:
        return source, target
    lifted = on_root(source, target.mesh)
    if lifted is not None:
        return lifted, target
    lifted = on_root(target, source.mesh)
    if lifted is not None:
        return source, lifted
    raise ValueError(
        f"{op} got {source!r} on {source.mesh!r} for {target!r} on {target.mesh!r}: these are not parts of one "
        f"another (at {user_line()}); put them on one mesh first"
    )


def _object(what: str) -> None:
    message = f"{what}; called at {user_line()}. Redistribute by hand where you want it"
    if settings.comm == "explicit":
        raise ImplicitCommunicationError(message)
    warnings.warn(message, stacklevel=2)
