"""Running a redistribution plan on this rank's local tensor, differentiably.

Owns the execution of plans, at once or begun now and completed later, and the autograd node ``Move``; ``_steps.py`` has
the steps. The backward of a move from A to B is the move from B's
cotangent to A's, and the backward of *that* is the move itself: the pair is an involution, which is what makes double
backward right for partial tensors. Reductions by min, max and product are not linear and have no backward here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from phalanx._torch_private import is_view
from phalanx.comm.group._staging import settled
from phalanx.tensor.layout._placement import PARTIAL_SUM, Partial, Placement
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._plan import Plan, plan_redistribute
from phalanx.tensor.redistribute._search import LOCAL_KINDS
from phalanx.tensor.redistribute._steps import actions_of
from phalanx.tensor.redistribute._sums import Sums, sum_partial, sums_over
from phalanx.tensor.redistribute._traced import TRACED, run_traced_plan

LINEAR_OPS = ("sum", "avg")


def run_plan(local: Tensor, plan: Plan) -> Tensor:
    """Run every step of ``plan`` on ``local``, without autograd. Of what has no memory nothing is sent."""
    if type(local) in TRACED:
        return run_traced_plan(local, plan)
    if not local.data_ptr() and plan.steps:
        if local.is_meta:
            return local.new_empty(plan.target.local_shape)
        local = settled(local)
    for begin, finish in plan.actions or actions_of(plan):
        _, local = begin(local, False)
        if finish is not None:
            local = finish(local)
    return local


class Started:
    """A plan whose last collective is under way; ``run`` waits for it and gives the local tensor."""

    def __init__(self, local: Tensor, plan: Plan) -> None:
        actions = actions_of(plan)
        last = max(i for i, step in enumerate(plan.steps) if step.kind not in LOCAL_KINDS)
        given = local
        if not local.data_ptr():
            local = settled(local)
        with torch.no_grad():
            for begin, finish in actions[:last]:  # each needs what the one before made
                _, local = begin(local, False)
                local = finish(local) if finish is not None else local
            if local is given:
                local = local.clone()  # the user may write to the tensor before it has been sent
            begin, self._finish = actions[last]
            self._work, self._filled = begin(local, True)
        self._sent = local  # must live until it has been sent
        self._rest = actions[last + 1 :]

    def run(self) -> Tensor:
        self._work.wait()
        local: Tensor = self._filled if self._finish is None else self._finish(self._filled)
        for begin, _ in self._rest:
            _, local = begin(local, False)
        return local


def start_plan(local: Tensor, plan: Plan, backward_dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """Begin ``plan``; calling the result completes it. Differentiable as ``move`` and ``move_as`` are."""
    started = Started(local.detach().to(plan.source.dtype), plan)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return started.run
    turn_back(route_of(plan))  # what has no gradient is refused here, not where the result is first used

    def complete() -> Tensor:
        with torch.enable_grad():  # whoever looks first may have it switched off
            return move_as(local, plan, backward_dtype, started)

    return complete


def redistribute_local(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """``local`` of a tensor laid out as ``source``, laid out as ``target``; differentiable."""
    if source is target:
        return local
    plan = plan_redistribute(source, target)
    if local.requires_grad and torch.is_grad_enabled():
        return move(local, route_of(plan))
    return run_plan(local, plan)


def move(local: Tensor, route: Route) -> Tensor:
    """``run_plan`` as an autograd node."""
    return local if route.is_relabel else follow(route, local)


def follow(route: Route, local: Tensor) -> Tensor:
    """``move`` by a route that is no relabelling."""
    if route.back is None:
        turn_back(route)
    if route.sums is not None and type(local) not in TRACED:
        return sum_partial(local, route.sums)
    result: Tensor = apply_move(local, route)
    return result


def move_as(local: Tensor, plan: Plan, backward_dtype: torch.dtype | None, started: Started | None = None) -> Tensor:
    """``local`` cast to the dtype of ``plan`` and moved; its gradient travels in ``backward_dtype``.

    Without one it travels in the dtype of the result.
    """
    source, target = (spec.with_dtype(backward_dtype or spec.dtype) for spec in (plan.source, plan.target))
    back = turn_back(route_of(plan_redistribute(source, target))).back
    apply: Any = _MoveAs.apply
    result: Tensor = apply(local, route_of(plan), back, started)
    return result


class Route:
    """A plan, what its result is multiplied by, and the route of the gradient once one was needed.

    ``summed``: mesh axes over whose replicas the gradient is still to be summed when it comes back.
    """

    __slots__ = ("back", "is_relabel", "plan", "scale", "summed", "sums", "target")

    def __init__(self, plan: Plan, scale: float, summed: tuple[int, ...] = ()) -> None:
        self.plan = plan
        self.target = plan.target
        self.scale = scale
        self.summed = summed
        self.back: Route | None = None
        self.is_relabel = plan.is_relabel  # not even a copy
        self.sums: Sums | None = None  # a shorter way than ``Move``, if the route is nothing but a sum


def route_of(plan: Plan, summed: tuple[int, ...] = ()) -> Route:
    """Return the route of a move, made once for each plan."""
    found: Route | None = plan.source.variants.get(("move", plan.target, summed))
    if found is None:
        found = plan.source.variants["move", plan.target, summed] = Route(plan, 1.0, summed)
    return found


def turn_back(route: Route) -> Route:
    """``route`` with its way back, whose way back is the route itself."""
    if route.back is None:
        plan = route.plan
        _check_linear(plan)
        comes = plan.target.cotangent
        if route.summed:
            placements = [PARTIAL_SUM if a in route.summed else p for a, p in enumerate(comes.placements)]
            comes = comes.with_placements(placements)
        back = Route(
            plan_redistribute(comes, plan.source.cotangent),
            _average_scale(plan.source, plan.target),
        )
        if [step.kind for step in plan.steps] == ["all_reduce"] and back.is_relabel and back.scale == 1.0:
            actions_of(plan)  # logs it
            route.sums = sums_over(plan.steps[0])
        back.back, route.back = route, back
    return route


def exposed_gradient(local: Tensor, spec: Spec) -> Tensor:
    """Return the gradient of a tensor laid out as ``spec``, as a tensor of its own that is itself differentiated.

    Inside of the graph a partial tensor's gradient meets work that differs from rank to rank, so that what comes back
    is summed over the ranks. As a tensor of its own it is a replica, with the same coming back on every rank: only one
    of them may go on.
    """
    if not spec.is_partial:
        return local
    parts = num_averaged(spec)
    return _passed(local if parts == 1 else local * parts, spec, exposed=True)


def entered_gradient(shown: Tensor, spec: Spec) -> Tensor:
    """``exposed_gradient`` undone: what goes on inside of the graph where the global tensor's gradient is ``shown``."""
    if not spec.is_partial:
        return shown
    parts = num_averaged(spec)
    return _passed(shown if parts == 1 else shown / parts, spec, exposed=False)


def _passed(local: Tensor, spec: Spec, exposed: bool) -> Tensor:
    """``local`` itself; what comes back is that of one rank (``exposed``), or the sum over all."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return local
    whole = spec.cotangent.with_dtype(local.dtype)
    sums = [isinstance(p, Partial) and p.reduce_op in LINEAR_OPS for p in spec.placements]
    parts = whole.with_placements([PARTIAL_SUM if s else p for s, p in zip(sums, whole.placements, strict=True)])
    way = (whole, parts) if exposed else (parts, whole)
    result: Tensor = apply_move(local, turn_back(route_of(plan_redistribute(*way))).back)
    return result


def num_averaged(spec: Spec) -> int:
    """Say how many contributions an average is made of; 1 for a tensor that is none.

    Inside of the graph a contribution has its own gradient, one n-th of the global tensor's.
    """
    if not spec.is_partial:
        return 1
    return math.prod(spec.mesh.shape[axis] for axis, p in enumerate(spec.placements) if p.is_partial("avg"))


def _average_scale(source: Spec, target: Spec) -> float:
    """Return what a gradient is multiplied by on the way back: a contribution to an average counts for one in n."""
    return num_averaged(target) / num_averaged(source)


class Move(torch.autograd.Function):
    """Forward runs one route, backward the other; applying it to the gradient swaps them."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, route: Route, started: Any = None) -> Tensor:
        ctx.route = route
        sent = local.detach()  # a collective on what requires grad takes a third longer
        moved = run_plan(sent, route.plan) if started is None else started.run()
        if route.scale != 1.0:
            return moved * route.scale
        if moved is sent:
            return local.view_as(local)
        # Torch lets nobody write to a view that is made in here.
        return moved.data if is_view(moved) else moved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, back = grads[0].contiguous(), ctx.route.back
        if grad.requires_grad and torch.is_grad_enabled():  # it will itself be differentiated
            return apply_move(grad, back), None, None
        moved = run_plan(grad, back.plan)
        return moved if back.scale == 1.0 else moved * back.scale, None, None


class _MoveAs(torch.autograd.Function):
    """``Move`` between dtypes: casts, then runs ``route``; backward casts, runs ``back``, and casts again."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, route: Route, back: Route, started: Started | None) -> Tensor:
        ctx.before, ctx.back = local.dtype, back
        return Move.forward(ctx, local.to(route.target.dtype), route, started)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].to(ctx.back.target.dtype).contiguous()
        return apply_move(grad, ctx.back).to(ctx.before), None, None, None


# torch's own ``apply`` looks for functorch's and our wrappers among the arguments; here are none.
apply_move: Any = super(torch.autograd.Function, Move).apply


class GradLayout(torch.autograd.Function):
    """Identity; the gradient that comes back is laid out as ``given`` and goes on as ``wanted``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, given: Spec, wanted: Spec) -> Tensor:
        ctx.specs = (given, wanted)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given, wanted = ctx.specs
        return (
            redistribute_local(grads[0], given.with_dtype(grads[0].dtype), wanted.with_dtype(grads[0].dtype)),
            None,
            None,
        )


def local_with_gradient(local: Tensor, spec: Spec, grad_placements: Sequence[Placement] | None) -> Tensor:
    """Return what ``to_local`` of a tensor laid out as ``spec`` gives where it will be differentiated."""
    if torch.is_grad_enabled():
        apply: Any
        given = spec.cotangent if grad_placements is None else spec.of_gradient(grad_placements)
        if any(isinstance(p, Partial) and p.reduce_op not in LINEAR_OPS for p in spec.placements):
            apply = _NoGradient.apply
            return cast(Tensor, apply(local, spec))
        if given is not spec.cotangent:
            apply = GradLayout.apply
            return cast(Tensor, apply(local, given, spec.cotangent))
    return local.view_as(local) if local.is_leaf else local


class _NoGradient(torch.autograd.Function):
    """Identity, which raises when a gradient comes back: that of a contribution to a maximum is not that of it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"rank {ctx.spec.mesh.get_rank()}: backward through to_local() of {ctx.spec!r}, whose contributions have "
            f"no gradient; redistribute it before (where no gradient is needed), or detach()"
        )


def _check_linear(plan: Plan) -> None:
    for step in plan.steps:
        before = step.source.placements[step.axis]
        if isinstance(before, Partial) and before.reduce_op not in LINEAR_OPS:
            raise RuntimeError(
                f"rank {plan.source.mesh.get_rank()}: {before!r} cannot be reduced where a gradient is needed; "
                f"redistribute before the reduction, or detach"
            )
