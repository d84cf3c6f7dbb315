"""How a torch call on DTensors will run on local tensors: asking the rule, choosing layouts, preparing the call.

Owns ``Decision`` and ``decide``, which ``_run.py`` runs and remembers. A decision depends on nothing but the
function, the specs of the DTensors and the other arguments. Where it matters whether gradients are needed, there are
two, and the one without them knows the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from phalanx._without_modes import without_user_modes
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.core._memory_order import OrderedCall
from phalanx.tensor.core._strides import Aliasing
from phalanx.tensor.dispatch._arguments import Structure, flatten
from phalanx.tensor.dispatch._empty_shards import kept_in_graph
from phalanx.tensor.layout._placement import REPLICATE
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import OPERATORS, OpName, op_name
from phalanx.tensor.ops._rule import Call, In, LocalRun, Operator, Sharding
from phalanx.tensor.ops._select import select
from phalanx.tensor.redistribute._execute import Route, route_of
from phalanx.tensor.redistribute._log import EVERYTHING, TRAFFIC, logger
from phalanx.tensor.redistribute._plan import plan_redistribute
from phalanx.tensor.redistribute._sums import Hooks, summing_hooks


class Decision:
    """How one call runs on locals."""

    __slots__ = (
        "aliasing", "call", "form", "graded", "is_new", "is_view", "moves", "name", "outputs", "plain",
        "plain_write", "reductions",
    )  # fmt: skip

    def __init__(self, name: str, form: str, outputs: tuple[Spec, ...], call: Callable[..., Any]) -> None:
        self.name = name
        self.form = form  # "one" tensor, "many", "self" (in place); "replicated", "general": not decided here
        self.outputs = outputs
        self.call = call  # takes the caller's arguments with locals in place of DTensors
        self.moves: tuple[tuple[int, Route], ...] = ()  # by position among the DTensors, as are reductions
        self.reductions: tuple[tuple[int, Hooks, tuple[int, ...]], ...] = ()  # of gradients that are not moved
        self.is_view = False
        self.is_new = True  # never the argument itself, nor a copy where the local call gives a view
        self.aliasing: Aliasing | None = None  # of views, and of what may be one
        self.plain: Spec | None = None  # of the result, if there is one and nothing but the call to be done
        self.plain_write = False  # the same for a call in place
        self.graded: Decision | None = None  # the decision where gradients are needed, if it is another one

    def settled(self) -> Decision:
        """Itself, with what follows from moves and reductions filled in."""
        if not self.moves and not self.reductions:
            self.plain = self.outputs[0] if self.form == "one" and self.is_new else None
            self.plain_write = self.form == "self"
        return self

    def without_reductions(self) -> Decision:
        """Make the decision where no gradients are needed of this one."""
        other = Decision(self.name, self.form, self.outputs, self.call)
        other.moves, other.is_view = self.moves, self.is_view
        other.aliasing, other.is_new = self.aliasing, self.is_new
        return other.settled()


def _not_here(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a decision to run elsewhere has no local call")


REPLICATED = Decision("", "replicated", (), _not_here)  # no rule for this call: ``_fallback.py``
GENERAL = Decision("", "general", (), _not_here)  # DTensors of several meshes, which are promoted first


def decide(func: Any, args: Any, kwargs: Any, tensors: Sequence[DTensor], structure: Structure | None) -> Decision:
    """Ask the rule and choose. The DTensors are on one mesh."""
    name = op_name(func)
    structure = structure or flatten(args, kwargs)
    inputs = []
    for i, tensor in enumerate(tensors):
        spec = tensor._spec
        inputs.append(In(i, spec, spec.shape, len(spec.shape), spec.dtype))
    call_args, call_kwargs = structure.rebuild(inputs)
    call = Call(OPERATORS[name.base], func, call_args, call_kwargs, inputs, True, name.in_place)
    with without_user_modes():
        return _decide(call, name)


def _decide(call: Call, name: OpName) -> Decision:
    """With and without gradients."""
    graded = _decide_one(call, name)
    if call.asked_for_grad:
        decision = _decide_one(dataclasses.replace(call, grad=False), name)
        if decision is REPLICATED:  # one for all calls, so it cannot know another
            return decision
    elif graded.reductions:
        decision = graded.without_reductions()
    else:
        return graded
    decision.graded = graded
    return decision


def _decide_one(call: Call, name: OpName) -> Decision:
    inputs = call.inputs
    rule = call.op.rule  # None: it was taken away since the handler was found
    if rule is None or not inputs or inputs[0].spec.is_outside:
        return REPLICATED
    sharding = rule(call)
    if sharding is None:
        _log_no_layout(name.base, inputs, "its rule has nothing for these arguments")
        return REPLICATED
    keep = inputs[0].spec.placements if name.in_place else None
    layouts = select(inputs, sharding, keep)
    if layouts is None:
        _log_no_layout(name.base, inputs, "none of its rule's layouts fits these inputs")
        return REPLICATED
    decision = _make(call, name, sharding, layouts)
    _log_decision(name.base, inputs, decision, len(sharding.choices))
    return decision


def _make(call: Call, name: OpName, sharding: Sharding, layouts: Any) -> Decision:
    ins, outs = layouts
    targets = tuple(
        one.spec if p == one.spec.placements else one.spec.with_placements(p)
        for one, p in zip(call.inputs, ins, strict=True)
    )
    if name.in_place:
        form = "self"
        outputs: tuple[Spec, ...] = (call.inputs[0].spec,)
    else:
        shapes = sharding.shapes or call.output_shapes()
        form = "one" if len(shapes) == 1 and (sharding.shapes or isinstance(call.meta(), Tensor)) else "many"
        first = call.inputs[0].spec
        assert len(shapes) == len(outs), f"{call.name}: the rule lays out {len(outs)} of {len(shapes)} outputs"
        outputs = tuple(
            first if p == first.placements and shape == first.shape else Spec.of(first.mesh, p, shape, first.dtype)
            for p, shape in zip(outs, shapes, strict=True)
        )
        if sharding.local is None and sharding.bind is None:
            _check_promise(call, targets, outputs)
    run = _local_call(sharding, LocalRun(call.func, targets, outputs))
    specs = {*targets, *outputs}
    if not name.in_place and call.op.aliasing != "if_needed" and any(spec.has_free_order for spec in specs):
        run = OrderedCall(run, call, targets, outputs, sharding)
    decision = Decision(call.name, form, outputs, run)
    decision.is_view = sharding.is_view
    if sharding.is_view or call.op.aliasing == "if_needed":
        decision.aliasing = Aliasing(call)
    decision.is_new = name.in_place or not _may_be_old(call.op, targets, outputs)
    if (
        call.grad
        and form != "self"
        and decision.aliasing is None
        and decision.is_new
        and any(0 in spec.local_shape and spec.num_elements for spec in specs)  # this rank holds nothing
    ):
        decision.call = kept_in_graph(run, call, targets)
    plans = [
        (i, plan_redistribute(one.spec, target))
        for i, (one, target) in enumerate(zip(call.inputs, targets, strict=True))
        if target is not one.spec
    ]
    summed = dict(_summed_axes(targets, outs)) if call.grad else {}
    decision.moves = tuple((i, route_of(plan, summed.pop(i, ()))) for i, plan in plans if not plan.is_relabel)
    decision.reductions = tuple((i, summing_hooks(targets[i], axes), axes) for i, axes in summed.items())
    return decision.settled()


def _may_be_old(op: Operator, targets: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> bool:
    source = targets[0]
    if op.aliasing != "if_needed":
        return op.aliasing == "self" or (op.name == "mT.get" and not source.shape)
    thin = any(part <= 1 < size for part, size in zip(source.local_shape, source.shape, strict=True))
    return thin or outputs[0].shape == source.shape


def _check_promise(call: Call, targets: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> None:
    """A rule that misread the arguments must not go unnoticed: torch tells the shapes that the locals will have."""
    found = call.local_shapes(targets)
    assert found is None or found == [spec.local_shape for spec in outputs], (
        f"rank {call.inputs[0].spec.mesh.get_rank()}: the rule for {call.name} promises {list(outputs)} of "
        f"{list(targets)}, but torch makes local results of shapes {found}. The rule is wrong: please report this call"
    )


def _local_call(sharding: Sharding, run: LocalRun) -> Callable[..., Any]:
    if sharding.bind is not None:
        return sharding.bind(run)
    local = sharding.local
    if local is None:
        return run.func  # type: ignore[no-any-return]  # a torch function
    return lambda *args, **kwargs: local(run, args, kwargs)


def _summed_axes(targets: tuple[Spec, ...], outs: list[Any]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Replicas that meet sharded or partial work on an axis: their gradients must be summed over it."""
    for index, target in enumerate(targets):
        if not (target.dtype.is_floating_point or target.dtype.is_complex):
            continue
        axes = tuple(
            axis
            for axis, placement in enumerate(target.placements)
            if placement is REPLICATE
            and target.mesh.shape[axis] > 1
            and any(out[axis] is not REPLICATE for out in outs)
        )
        if axes:
            yield index, axes


def _log_decision(name: str, inputs: Sequence[In], decision: Decision, num_choices: int) -> None:
    """Log what came in, what was chosen, what that moves, and why."""
    if not logger.isEnabledFor(TRAFFIC):
        return
    call, outs = _call_text(name, inputs), ", ".join(out.layout for out in decision.outputs)
    if decision.moves:
        moved = "; ".join(f"input {i}: {route.plan!r}" for i, route in decision.moves)
        logger.log(
            TRAFFIC,
            "%s -> %s, moves %s: the fewest bytes of %d choices an axis",
            call,
            outs,
            moved,
            num_choices,
        )
    else:
        logger.log(EVERYTHING, "%s -> %s, moves nothing", call, outs)


def _log_no_layout(name: str, inputs: Sequence[In], why: str) -> None:
    if logger.isEnabledFor(TRAFFIC):
        logger.log(TRAFFIC, "%s: %s", _call_text(name, inputs), why)


def _call_text(name: str, inputs: Sequence[In]) -> str:
    given = ", ".join(repr(one.spec) for one in inputs)
    return f"rank {inputs[0].spec.mesh.get_rank()}: {name}({given})"
