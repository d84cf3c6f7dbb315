"""From a torch call on DTensors to the same call on local tensors.

Owns the cache of decisions and their execution. The first call with given layouts and arguments asks a rule
(``rules/``), chooses layouts (``_select.py``) and remembers a ``Decision``; later ones look it up, move inputs if
needed, run torch on the locals and wrap the result.

Order of handlers for a torch function: a special handler (``_special.py``), a sharding rule, running a Python function
through (``_through.py``), computing replicated (``_fallback.py``).

Invariants: a decision depends on nothing but its key (function, specs, other arguments, whether gradients are needed);
specs name the mesh with its groups, so simulated ranks never share one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor._arguments import KEPT_FLOATS, NeedsPromotion, Structure, flatten, promote
from phalanx.tensor._dtensor import DTensor, _handlers, _make_subclass, wrap
from phalanx.tensor._execute import move, reduce_gradient, run_plan
from phalanx.tensor._fallback import run_replicated, write_out
from phalanx.tensor._log import log_decision
from phalanx.tensor._modes import (
    check_explicit_move,
    check_explicit_reduction,
    settings,
)
from phalanx.tensor._names import OpName, in_signature_order, op_name
from phalanx.tensor._plan import Plan, plan_redistribute
from phalanx.tensor._rule import Call, In, LocalRun, Sharding, tensors_in
from phalanx.tensor._select import select
from phalanx.tensor._spec import Spec
from phalanx.tensor._through import run_through, through
from phalanx.tensor._views import check_fresh, check_writable, mark_copied_view

CACHE_LIMIT = 20_000

_PLAIN = frozenset({int, str, type(None), torch.dtype, torch.device, torch.memory_format, complex})
_SIMPLE = frozenset({int, str, type(None), torch.dtype})  # no two of them are equal across types
_FLOATS = KEPT_FLOATS
_SEQUENCES = frozenset({tuple, list, torch.Size})
_INTS = frozenset({int})
_NO_KEYWORDS: dict[str, Any] = {}
_BOOL_KEYS = {False: "=False", True: "=True"}


class Decision:
    """How one call runs on locals."""

    __slots__ = (
        "form",
        "inputs",
        "is_view",
        "local",
        "moves",
        "name",
        "outputs",
        "plain",
        "reductions",
        "run",
    )

    def __init__(self, name: str, form: str, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> None:
        self.name = name
        self.form = form  # "one" tensor, "many", "self" (in place)
        self.inputs = inputs
        self.outputs = outputs
        self.moves: tuple[tuple[int, Plan], ...] = ()
        self.reductions: tuple[tuple[int, tuple[Any, ...]], ...] = ()
        self.local: Any = None
        self.run: Any = None
        self.is_view = False
        self.plain = False  # one local call, nothing moved, one result


_cache: dict[Any, Decision | None] = {}


def forget_decisions() -> None:
    """Decide anew from now on: a rule was changed."""
    _cache.clear()


def run_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of every function that has a sharding rule; the hot path."""
    if not kwargs and args and type(args[0]) is DTensor:
        if len(args) == 1:
            return _run_first(func, args)
        if len(args) == 2 and type(args[1]) is DTensor:
            return _run_pair(func, args)
        if _SIMPLE.issuperset(map(type, args[1:])):
            return _run_first(func, args)
    key: list[Any] = [func]
    values: list[Any] = []
    grad = False
    for arg in args:
        kind = type(arg)
        if kind is DTensor:
            if arg._stale is not None:
                check_fresh(arg)
            local = arg._local
            if local.requires_grad:
                grad = True
            key.append(arg._spec)
            values.append(local)
            continue
        values.append(arg)
        if kind in _PLAIN:
            key.append(arg)
        elif kind is float:
            key.append(arg if arg in _FLOATS else float)
        elif kind is bool:
            key.append(_BOOL_KEYS[arg])
        elif kind in _SEQUENCES and _INTS.issuperset(map(type, arg)):
            key.append(tuple(arg))
        else:
            return _run_general(func, args, kwargs)
    if kwargs:
        for name, arg in kwargs.items():
            kind = type(arg)
            if kind in _PLAIN:
                key += (name, arg)
            elif kind is bool:
                key += (name, _BOOL_KEYS[arg])
            elif kind is float:
                key += (name, arg if arg in _FLOATS else float)
            else:
                return _run_general(func, args, kwargs)
    else:
        kwargs = _NO_KEYWORDS
    if grad:
        grad = torch.is_grad_enabled()
    key.append(grad)
    found = tuple(key)
    try:
        decision = _cache[found]
    except KeyError:
        tensors = [arg for arg in args if type(arg) is DTensor]
        if any(t._spec.mesh is not tensors[0]._spec.mesh for t in tensors):
            return _run_general(func, args, kwargs)
        decision = _decide_and_remember(found, func, args, kwargs, tensors, grad)
    if decision is None:
        return run_replicated(func, args, kwargs)
    if decision.form == "self" and args[0]._stale is not None:
        check_writable(args[0], decision.name)
    if decision.moves or decision.reductions:
        _move_inputs(decision, args, values)
    if decision.local is None:
        result = func(*values, **kwargs)
    else:
        result = decision.local(decision.run, tuple(values), kwargs)
    if decision.form == "one" and not decision.is_view:
        return wrap(result, decision.outputs[0])
    return _finish(decision, result, args[0], args)


def _run_first(func: Any, args: Any) -> Any:
    """``run_rule`` for one DTensor, with sizes and dims after it or nothing."""
    tensor, rest = args[0], args[1:]
    stale = tensor._stale
    if stale is not None:
        check_fresh(tensor)
    local = tensor._local
    grad = local.requires_grad and torch.is_grad_enabled()
    found = (func, grad, tensor._spec, rest)
    try:
        decision = _cache[found]
    except KeyError:
        decision = _decide_and_remember(found, func, args, {}, [tensor], grad)
    if decision is None:
        return run_replicated(func, args, None)
    if decision.plain and stale is None:
        return wrap(func(local, *rest), decision.outputs[0])
    values = [local, *rest]
    if decision.form == "self" and stale is not None:
        check_writable(tensor, decision.name)
    if decision.moves or decision.reductions:
        _move_inputs(decision, args, values)
    result = func(*values) if decision.local is None else decision.local(decision.run, tuple(values), {})
    return _finish(decision, result, tensor, args)


def _run_pair(func: Any, args: Any) -> Any:
    """``run_rule`` for two DTensors and nothing else, which is most of what a model does."""
    left, right = args
    if left._stale is not None:
        check_fresh(left)
    if right._stale is not None:
        check_fresh(right)
    a, b = left._local, right._local
    grad = (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()
    found = (func, left._spec, right._spec, grad)
    try:
        decision = _cache[found]
    except KeyError:
        if left._spec.mesh is not right._spec.mesh:
            return _run_general(func, args, None)
        decision = _decide_and_remember(found, func, args, {}, [left, right], grad)
    if decision is None:
        return run_replicated(func, args, None)
    if decision.plain and left._stale is None:
        result = func(a, b)
        spec = decision.outputs[0]
        if result.dtype is not spec.dtype:
            spec = spec.with_dtype(result.dtype)
        wrapped = _make_subclass(DTensor, spec.template)
        wrapped._local = result
        wrapped._spec = spec
        return wrapped
    values = [a, b]
    if decision.form == "self" and left._stale is not None:
        check_writable(left, decision.name)
    if decision.moves or decision.reductions:
        _move_inputs(decision, args, values)
    result = func(*values) if decision.local is None else decision.local(decision.run, tuple(values), {})
    return _finish(decision, result, left, args)


def _move_inputs(decision: Decision, args: Any, values: list[Any]) -> None:
    """Bring inputs into the layouts of the decision. ``values`` holds the locals, at the positions of ``args``."""
    explicit = settings.comm != "auto"
    for position, plan in decision.moves:
        if explicit:
            check_explicit_move(decision.name, plan.source, plan.target)
        local = values[position]
        values[position] = (
            move(local, plan) if local.requires_grad and torch.is_grad_enabled() else run_plan(local, plan)
        )
    for position, (groups, axes) in decision.reductions:
        local = values[position]
        if local.requires_grad:
            if explicit:
                check_explicit_reduction(decision.name, args[position]._spec, axes)
            values[position] = reduce_gradient(local, groups)


def _run_general(func: Any, args: Any, kwargs: Any) -> Any:
    """The same for nested arguments, keywords, plain tensors among them, and ``out=``."""
    kwargs = in_signature_order(func, dict(kwargs)) if kwargs else {}
    out = kwargs.pop("out", None)
    if out is not None:
        return write_out(func(*args, **kwargs), out)
    try:
        structure = flatten(args, kwargs)
    except NeedsPromotion:
        args, kwargs = promote(op_name(func).base, args, kwargs)
        return func(*args, **kwargs)
    tensors = structure.tensors
    grad = torch.is_grad_enabled() and any(t._local.requires_grad for t in tensors)
    if structure.key is None:
        decision = _decide(func, args, kwargs, tensors, grad, structure)
    else:
        found = (func, *structure.key, grad)
        try:
            decision = _cache[found]
        except KeyError:
            decision = _decide_and_remember(found, func, args, kwargs, tensors, grad, structure)
    if decision is None:
        return run_replicated(func, args, kwargs)
    if decision.form == "self" and tensors[0]._stale is not None:
        check_writable(tensors[0], decision.name)
    values: list[Any] = [t._local for t in tensors]
    if decision.moves or decision.reductions:
        _move_inputs(decision, tensors, values)
    local_args, local_kwargs = structure.rebuild(values)
    if decision.local is None:
        result = func(*local_args, **local_kwargs)
    else:
        result = decision.local(decision.run, local_args, local_kwargs)
    return _finish(decision, result, tensors[0], tensors)


def _finish(decision: Decision, result: Any, first: DTensor, tensors: Any) -> Any:
    if decision.form == "self":
        return first
    if decision.form == "one" and not (decision.is_view and (decision.moves or first._stale is not None)):
        return wrap(result, decision.outputs[0])
    wrapped = wrap_all(result, iter(decision.outputs))
    if decision.is_view and (decision.moves or first._stale is not None):
        for view in tensors_in(wrapped):
            mark_copied_view(view, tensors[0], decision.name)
    return wrapped


def wrap_all(result: Any, outputs: Any) -> Any:
    if isinstance(result, Tensor):
        return wrap(result, next(outputs))
    if isinstance(result, (list, tuple)):
        items = [wrap_all(item, outputs) for item in result]
        if type(result) in (list, tuple):
            return type(result)(items)
        return (
            type(result)(items) if type(result).__module__ == "torch.return_types" else type(result)(*items)
        )
    return result


def _decide_and_remember(
    found: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    tensors: list[DTensor],
    grad: bool,
    structure: Structure | None = None,
) -> Decision | None:
    decision = _decide(func, args, kwargs, tensors, grad, structure)
    if len(_cache) >= CACHE_LIMIT:
        _cache.clear()
    _cache[found] = decision
    return decision


def _decide(
    func: Any, args: Any, kwargs: Any, tensors: list[DTensor], grad: bool, structure: Structure | None
) -> Decision | None:
    """Ask the rule and choose. None: no rule for this call, compute it replicated."""
    name = op_name(func)
    flat = structure is None
    structure = structure or flatten(args, kwargs)
    inputs = [In(i, t._spec) for i, t in enumerate(tensors)]
    call_args, call_kwargs = structure.rebuild(inputs)
    call = Call(name.base, func, call_args, call_kwargs, inputs, grad, name.in_place)
    sharding = rule_of(name)(call) if inputs and inputs[0].spec.mesh.get_coordinate() is not None else None
    if sharding is None:
        return None
    keep = inputs[0].spec.placements if name.in_place else None
    layouts = select(inputs, sharding, keep)
    if layouts is None:
        log_decision(name.base, inputs, None)
        return None
    decision = _make(call, name, sharding, layouts)
    if flat:  # positions among all arguments, which is how the hot path finds them
        positions = [i for i, arg in enumerate(args) if type(arg) is DTensor]
        decision.moves = tuple((positions[i], plan) for i, plan in decision.moves)
        decision.reductions = tuple((positions[i], what) for i, what in decision.reductions)
    decision.plain = (
        decision.form == "one" and decision.local is None and not (decision.moves or decision.reductions)
    )
    log_decision(name.base, inputs, decision)
    return decision


def _make(call: Call, name: OpName, sharding: Sharding, layouts: Any) -> Decision:
    ins, outs = layouts
    targets = tuple(one.spec.with_placements(p) for one, p in zip(call.inputs, ins, strict=True))
    if name.in_place:
        form = "self"
        outputs: tuple[Spec, ...] = (call.inputs[0].spec,)
    else:
        shapes = sharding.shapes or call.output_shapes()
        form = "one" if len(shapes) == 1 and (sharding.shapes or isinstance(call.meta(), Tensor)) else "many"
        mesh, dtype = call.inputs[0].spec.mesh, call.inputs[0].dtype
        assert len(shapes) == len(outs), (
            f"{call.name}: the rule lays out {len(outs)} of {len(shapes)} outputs"
        )
        outputs = tuple(Spec.of(mesh, p, shape, dtype) for p, shape in zip(outs, shapes, strict=True))
    decision = Decision(call.name, form, targets, outputs)
    decision.is_view = sharding.is_view
    decision.local = sharding.local
    decision.run = LocalRun(call.func, targets, outputs)
    decision.moves = tuple(
        (i, plan_redistribute(one.spec, target))
        for i, (one, target) in enumerate(zip(call.inputs, targets, strict=True))
        if target is not one.spec
    )
    if call.needs_grad:
        decision.reductions = tuple(_reductions(targets, outs))
    return decision


def _reductions(targets: tuple[Spec, ...], outs: list[Any]) -> Any:
    """Replicas that meet sharded or partial work on an axis: their gradients must be summed over it."""
    for index, target in enumerate(targets):
        if not (target.dtype.is_floating_point or target.dtype.is_complex):
            continue
        axes = tuple(
            axis
            for axis, placement in enumerate(target.placements)
            if placement.is_replicate()
            and target.mesh.shape[axis] > 1
            and any(not out[axis].is_replicate() for out in outs)
        )
        if axes:
            yield index, (tuple(target.mesh.get_group(axis) for axis in axes), axes)


def rule_of(name: OpName) -> Any:
    from phalanx.tensor.rules import RULES

    return RULES.get(
        name.base, lambda call: None
    )  # a rule may have been taken away since the handler was found


def find_handler(func: Any) -> Any:
    """Decide once how a torch function is handled."""
    from phalanx.tensor._special import special_handler
    from phalanx.tensor.rules import DIRECT_PYTHON, RULES

    name = op_name(func)
    handler = special_handler(func, name)
    if handler is None:
        body = None if func in DIRECT_PYTHON else through(func)
        if body is not None:
            handler = functools.partial(run_through, body)
        elif name.base in RULES:
            handler = run_rule
        else:
            handler = run_replicated
    _handlers[func] = handler
    return handler
