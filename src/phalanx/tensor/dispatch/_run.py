"""From a torch call on DTensors to the same call on local tensors.

Owns the cache of decisions and their execution. The first call with given layouts and arguments asks for a
``Decision`` (``_decision.py``); later ones look it up, move inputs if needed, run torch on the locals and wrap the
result.

Numbers that are operands of functions which go element by element are left out of the key if the number itself was not
met: a counter of steps is no new decision at every step.

How a call is looked up is settled once for the types of its arguments: a runner knows where the DTensors are and what
of the other arguments belongs in the key. For the commonest combinations they are made when this module is imported.

Invariants: a decision depends on nothing but its key (function, specs, other arguments with their types); specs name
the mesh with its groups, so simulated ranks never share one. Whether gradients are needed is asked only where the
decision has a second form for it.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.tensor.core._copied_views import check_up_to_date, check_writable
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._implicit_communication import check_move, check_reduction
from phalanx.tensor.core._memory_order import kept_order
from phalanx.tensor.core._modes import settings
from phalanx.tensor.dispatch._arguments import (
    KEPT_FLOATS,
    NeedsPromotion,
    Structure,
    flatten,
    is_general,
    key_of_any_numbers,
    promote,
    run_handler,
    with_numbers,
)
from phalanx.tensor.dispatch._decision import GENERAL, REPLICATED, Decision, decide
from phalanx.tensor.dispatch._fallback import run_replicated, write_out
from phalanx.tensor.dispatch._results import finish
from phalanx.tensor.dispatch._runner_source import FLOAT, REST, SEQUENCE, TENSOR, VALUE, runner_source
from phalanx.tensor.ops._registry import OPERATORS, op_name
from phalanx.tensor.ops._signatures import in_signature_order
from phalanx.tensor.redistribute._execute import move, run_plan
from phalanx.tensor.redistribute._sums import reduce_gradient

CACHE_LIMIT = 20_000

_Runner = Callable[..., Any]

# Types of arguments whose value can be a part of the key as it is; types are told apart by the runner's number.
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, complex, torch.Size})
SIMPLE = frozenset({int, str, type(None), torch.dtype})  # no two of them are equal across types
_SEQUENCES = frozenset({tuple, list})
_KNOWN = _PLAIN | _SEQUENCES | {float, DTensor}
_INTS = frozenset({int})
_NO_KEYWORDS: dict[str, Any] = {}
_grad_enabled = torch.is_grad_enabled

_cache: dict[Any, Decision] = {}


def forget_decisions() -> None:
    """Decide anew from now on: a rule was changed."""
    _cache.clear()


def run_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that has a sharding rule; the handler of all of them, and the hot path."""
    if kwargs:
        names = tuple(kwargs)
        values = (*args, *kwargs.values())
        kinds = tuple(map(type, values))
        runner = _runners.get((names, kinds)) or _make_runner(kinds, names)
        return _run_general(func, args, kwargs) if runner is None else runner(func, values)
    if args and type(args[0]) is DTensor:  # one to three DTensors: most of what a model does
        count = len(args)
        if count == 1:
            return run_one(func, args[0])
        if type(args[1]) is DTensor:
            if count == 2:
                return run_pair(func, args[0], args[1])
            if count == 3 and type(args[2]) is DTensor:
                return _run_three(func, *args)
            rest = args[2:]
            if SIMPLE.issuperset(map(type, rest)):
                return run_first_two(func, args[0], args[1], rest)
        rest = args[1:]
        if SIMPLE.issuperset(map(type, rest)):
            return run_first(func, args[0], rest)
        if count == 2 and type(args[1]) is float:
            return run_scalar(func, args[0], args[1])
    return run_mixed(func, args)


def run_mixed(func: Any, args: tuple[Any, ...]) -> Any:
    """``run_rule`` for arguments of any types."""
    kinds = tuple(map(type, args))
    try:
        runner: _Runner | None = _runners[kinds]
    except KeyError:
        runner = _make_runner(kinds, ())
    return _run_general(func, args, None) if runner is None else runner(func, args)


_numbers = itertools.count()
_runners: dict[Any, _Runner] = {}


def _make_runner(kinds: tuple[type, ...], names: tuple[str, ...]) -> _Runner | None:
    """Return the runner for arguments of these types, the last ones keywords; None: only the general way will do.

    It alone puts several DTensors among the keywords in order.
    """
    if DTensor not in kinds or "out" in names or not _KNOWN.issuperset(kinds):
        return None
    if kinds[len(kinds) - len(names) :].count(DTensor) > 1:
        return None
    number = next(_numbers)  # no two runners have one, whichever threads make them
    runner = _compiled(number, [_role(kind) for kind in kinds], names)
    if runner is not None:
        _runners[(names, kinds) if names else kinds] = runner
    return runner


def _compiled(
    number: int, roles: Sequence[str], names: tuple[str, ...] = (), *, is_direct: bool = False
) -> _Runner | None:
    source = runner_source(roles, names, is_direct=is_direct)
    if source is None:
        return None
    scope: dict[str, Any] = {
        "cache": _cache,
        "grad_enabled": _grad_enabled,
        "ints": _INTS,
        "kept_floats": KEPT_FLOATS,
        "learn": _learn,
        "names": names,
        "no_keywords": _NO_KEYWORDS,
        "number": number,
        "positions": tuple(i for i, role in enumerate(roles) if role is TENSOR),
        "run_decision": _run,
        "run_general": _run_general,
        "split": _split,
        "wrap": wrap,
    }
    file = f"<runner {number} of {__name__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for debuggers
    exec(compile(source, file, "exec"), scope)
    runner: _Runner = scope["run"]
    return runner


def _direct(*roles: str) -> Callable[..., Any]:
    runner = _compiled(next(_numbers), roles, is_direct=True)
    assert runner is not None, "it has no names"
    return runner


def _role(kind: type) -> str:
    return TENSOR if kind is DTensor else FLOAT if kind is float else SEQUENCE if kind in _SEQUENCES else VALUE


def _split(values: Any, names: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Positional arguments and keywords, the last values, apart again."""
    count = len(values) - len(names)
    return values[:count], dict(zip(names, values[count:], strict=True))


def _learn(
    found: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    tensors: Sequence[DTensor],
    structure: Structure | None = None,
) -> Decision:
    """Decide and remember: for any numbers, where these change nothing."""
    if OPERATORS[op_name(func).base].numbers:
        general = key_of_any_numbers(args, kwargs)
        if general is not None:
            found = (func, general)
            known = _cache.get(found)
            if known is not None:
                return known
    if structure is None and len(tensors) > 1 and is_general(func, args, kwargs, tensors):
        decision = GENERAL
    else:
        decision = decide(func, args, kwargs, tensors, structure)
    if len(_cache) >= CACHE_LIMIT:
        _cache.clear()
    _cache[found] = decision
    return decision


def _run(
    decision: Decision,
    func: Any,
    given: Any,
    values: list[Any],
    positions: Sequence[int],
    names: tuple[str, ...] = (),
) -> Any:
    """Whatever a plain call spares. ``values`` are those given, with locals at the ``positions`` of DTensors."""
    if decision is REPLICATED or decision is GENERAL:
        elsewhere = run_replicated if decision is REPLICATED else _run_general
        return elsewhere(func, *_split(given, names))
    for i in positions:
        if given[i]._copied_view is not None:
            check_up_to_date(given[i])
    first = given[positions[0]]
    if decision.form == "self" and first._copied_view is not None:
        check_writable(first, decision.name)
    if decision.moves or decision.reductions:
        _move_inputs(decision, given, values, positions)
    if names:
        args, kwargs = _split(values, names)
        return finish(decision, decision.call(*args, **kwargs), first, ())
    return finish(decision, decision.call(*values), first, given)


def _move_inputs(decision: Decision, given: Any, values: list[Any], positions: Sequence[int]) -> None:
    """Bring inputs into the layouts of the decision, in ``values``."""
    explicit = settings.comm != "auto"
    for index, route in decision.moves:
        position = positions[index]
        local = values[position]
        needs_grad = local.requires_grad and _grad_enabled()
        if explicit:
            check_move(decision.name, route, needs_grad)
        moved = move(local, route) if needs_grad else run_plan(local, route.plan)
        values[position] = kept_order(moved, route.target, given[position])
    for index, hooks, axes in decision.reductions:
        position = positions[index]
        local = values[position]
        if local.requires_grad:
            if explicit:
                check_reduction(decision.name, given[position]._spec, axes)
            values[position] = reduce_gradient(given[position], local, hooks, axes)


def _run_general(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call with nested arguments, plain tensors among them, or ``out=``."""
    kwargs = in_signature_order(func, dict(kwargs)) if kwargs else {}
    out = kwargs.pop("out", None)
    if out is not None:
        return write_out(run_handler(func, args, kwargs), out)
    plain = with_numbers(func, args, kwargs)
    if plain is not None:
        return run_handler(func, *plain)
    try:
        structure = flatten(args, kwargs)
    except NeedsPromotion:
        return run_handler(func, *promote(op_name(func), args, kwargs))
    tensors = structure.tensors
    if structure.key is None:
        decision = decide(func, args, kwargs, tensors, structure)
    else:
        found = (func, *structure.key)
        try:
            decision = _cache[found]
        except KeyError:
            decision = _learn(found, func, args, kwargs, tensors, structure)
    if decision.graded is not None and _grad_enabled() and any(t._local.requires_grad for t in tensors):
        decision = decision.graded
    if decision is REPLICATED:
        return run_replicated(func, args, kwargs)
    if decision.form == "self" and tensors[0]._copied_view is not None:
        check_writable(tensors[0], decision.name)
    values: list[Any] = [t._local for t in tensors]
    if decision.moves or decision.reductions:
        _move_inputs(decision, tensors, values, range(len(values)))
    local_args, local_kwargs = structure.rebuild(values)
    return finish(decision, decision.call(*local_args, **local_kwargs), tensors[0], () if kwargs else tuple(args))


# ``run_rule`` for the arguments of most calls, which have been told apart already: DTensors, followed by values of the
# types in ``SIMPLE`` (sizes, dims) or by a number, which is left out of the key as ``KEPT_FLOATS`` says.
run_one = _direct(TENSOR)
run_pair = _direct(TENSOR, TENSOR)
_run_three = _direct(TENSOR, TENSOR, TENSOR)
run_first = _direct(TENSOR, REST)
run_first_two = _direct(TENSOR, TENSOR, REST)
run_scalar = _direct(TENSOR, FLOAT)
