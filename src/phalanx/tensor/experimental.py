"""What users need beyond built-in rules: running on local shards, rules of their own, implicit replicas.

Owns ``local_map`` and ``register_sharding``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import CustomOpDef, operations, overload_of, tree_flatten, tree_unflatten
from phalanx.comm import DeviceMesh
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.core._modes import implicit_replication
from phalanx.tensor.core._tracing import handlers
from phalanx.tensor.dispatch._inline_python import inlined
from phalanx.tensor.dispatch._run import forget_decisions, run_rule
from phalanx.tensor.layout._placement import Placement, normalize
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._registry import OPERATORS, give_rule, op_name
from phalanx.tensor.ops._rule import Call, Choice, In, Rule, Sharding, all_replicated
from phalanx.tensor.patches._handlers import is_functional, is_overload_of_torch

__all__ = ["implicit_replication", "local_map", "register_sharding"]

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Placements] | None = None,
    in_grad_placements: Sequence[Placements] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    out_shapes: Any = None,
) -> Any:
    """``func`` on this rank's shard: DTensors go in as local tensors, results come out as DTensors.

    Positional arguments and results may be nested in lists, tuples and dicts; keyword arguments go in as they are.
    ``out_placements``: placements of the result, or one such list for each result (None: not a tensor).
    ``in_placements``: what each argument must have (None: anything); another layout is an error unless
    ``redistribute_inputs``. ``in_grad_placements``: how the gradient of each local argument is laid out. All DTensors
    are on one mesh; ``device_mesh`` says which where no argument does. ``out_shapes``: the global shape of the result,
    one for each result (None: not told), or a function of the arguments that returns those. Sizes of sharded results
    that are not told are gathered in every call: what each rank's ``func`` makes is never guessed.

    >>> @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))   # doctest: +SKIP
    ... def matmul(a, b):
    ...     return a @ b
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
            out_shapes=out_shapes,
        )
    inner = func

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given, structure = tree_flatten(args)
        mesh = _mesh_of(given, device_mesh)
        wanted = _one_each(in_placements, len(given), "arguments", "in_placements")
        grads = _one_each(in_grad_placements, len(given), "arguments", "in_grad_placements")
        local = [
            _to_local(i, *each, redistribute_inputs) for i, each in enumerate(zip(given, wanted, grads, strict=True))
        ]
        result = inner(*tree_unflatten(local, structure), **kwargs)
        if mesh is None:
            return result
        results, structure = tree_flatten(result)
        placements = _one_each(out_placements, len(results), "results", "out_placements")
        told = out_shapes(*args, **kwargs) if callable(out_shapes) else out_shapes
        shapes = _shape_each(told, len(results))
        given_out = zip(results, placements, shapes, strict=True)
        made = [_from_local(i, *each, mesh) for i, each in enumerate(given_out)]
        return tree_unflatten(made, structure)

    return wrapper


def _mesh_of(given: list[Any], device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh that all DTensors are on."""
    found, named = device_mesh, "device_mesh= is"
    for i, arg in enumerate(given):
        if not isinstance(arg, DTensor):
            continue
        if found is not None and arg.device_mesh != found:
            raise ValueError(
                f"local_map: argument {i} is on {arg.device_mesh}, {named} {found}: put them on one mesh first"
            )
        if found is None:
            found, named = arg.device_mesh, f"argument {i} on"
    return found


def _one_each(given: Any, count: int, of: str, name: str) -> Sequence[Placements]:
    """Placements for each of ``count`` arguments or results; those of a single one may stand alone."""
    if given is None:
        return [None] * count
    if isinstance(given, Placement) or (given and all(isinstance(p, Placement) for p in given)):
        given = [given]
    if len(given) != count:
        raise ValueError(f"local_map got {count} {of} for {len(given)} {name}: give each its own, or None")
    return list(given)


def _shape_each(given: Any, count: int) -> Sequence[Any]:
    """Return a shape or None for each of ``count`` results; that of a single one may stand alone."""
    if given is None:
        return [None] * count
    if isinstance(given, torch.Size) or all(isinstance(n, int) for n in given):
        given = [given]
    if len(given) != count:
        raise ValueError(f"local_map got {count} results for {len(given)} out_shapes: give each its own, or None")
    return list(given)


def _to_local(i: int, arg: Any, wanted: Placements, grads: Placements, move: bool) -> Any:
    if not isinstance(arg, DTensor):
        if isinstance(arg, Tensor) and wanted is not None:
            raise ValueError(f"local_map argument {i} is a plain tensor, but in_placements asks for {list(wanted)}")
        return arg
    if wanted is not None:
        exact = normalize(wanted, arg.device_mesh.ndim, arg.ndim)
        if exact != arg.placements:
            if not move:
                raise ValueError(
                    f"local_map argument {i} has {arg._spec.layout}, but in_placements asks for {list(exact)}; "
                    f"redistribute it, or pass redistribute_inputs=True"
                )
            arg = arg.redistribute(placements=exact)
    return arg.to_local(grad_placements=grads)


def _from_local(i: int, result: Any, placements: Placements, shape: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(result, Tensor):
        if placements is not None:
            raise ValueError(
                f"local_map: result {i} is {result!r}, not a tensor: give None in place of {list(placements)}"
            )
        return result
    if placements is None:
        raise ValueError(
            f"local_map: result {i} is a tensor of shape {tuple(result.shape)}, but out_placements gives it none: "
            f"[Replicate()] if it is the same on every rank"
        )
    return DTensor.from_local(result, mesh, placements, shape=None if shape is None else torch.Size(shape))


def register_sharding(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function (or several) a sharding rule for one mesh axis.

    The decorated function gets the call's arguments, with a ``Spec`` (shape, dtype, placements) in place of each
    DTensor, and returns a list of choices: (placements of the results, placements of the arguments; None for
    arguments that are not tensors). Full replication is always a choice. ``op`` is anything that dispatches through
    ``__torch_function__``; an overload such as ``torch.ops.aten.erf.default`` stands for its function, and the rule is
    asked for those calls whose arguments it takes.

    >>> @register_sharding(my_gelu)                               # doctest: +SKIP
    ... def rule(x):
    ...     return [([Shard(d)], [Shard(d)]) for d in range(len(x.shape))]
    """
    ops = [_operation(one) for one in (op if isinstance(op, (list, tuple)) else [op])]

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        for one in ops:
            name = op_name(one).base
            give_rule(name, functools.partial(_ask, rule, OPERATORS[name].rule))
            for other in [known for known in handlers if op_name(known).base == name]:
                handlers.pop(other, None)  # under whichever of its names it was called before
            if not is_functional(one, OPERATORS[name]) and inlined(one) is not None:
                handlers[one] = run_rule  # its Python body need not run any more
        forget_decisions()
        return rule

    return decorate


_REGISTERED = (operations.OpOverload, operations.OpOverloadPacket)
_OF_TENSORS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def _operation(op: Any) -> Any:
    """``op``, or the operation behind it; an error if DTensors would never hear of its calls."""
    if isinstance(op, CustomOpDef):
        return overload_of(op)
    if is_overload_of_torch(op):
        return op.overloadpacket
    if isinstance(op, _OF_TENSORS):
        known = issubclass(Tensor, op.__objclass__)
    elif isinstance(op, (types.BuiltinFunctionType, types.FunctionType)):
        code = getattr(op, "__code__", None)
        checks = code is not None and "handle_torch_function" in code.co_names
        known = checks or (op.__module__ or "").partition(".")[0] == "torch"
    else:
        known = isinstance(op, _REGISTERED)
    if not known:
        raise TypeError(
            f"register_sharding({op!r}): not a function that DTensors intercept. Pass a function of torch itself, such "
            f"as torch.add, an operation of torch.ops, or what torch.library.custom_op returned"
        )
    return op


def _ask(rule: Callable[..., Any], before: Rule | None, call: Call) -> Sharding | None:
    specs: dict[int, Spec] = {one.index: one.spec for one in call.inputs}

    def seen(value: Any) -> Any:
        return specs[value.index] if isinstance(value, In) else value

    args, kwargs = [seen(arg) for arg in call.args], {name: seen(value) for name, value in call.kwargs.items()}
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:  # a form of the function that the rule does not know
        return before(call) if before is not None else Sharding([all_replicated(call, len(call.output_shapes()))])
    answers = rule(*args, **kwargs)
    if not isinstance(answers, (list, tuple)) or not all(map(_is_choice, answers)):
        raise TypeError(
            f"the rule of {call.name} returned {answers!r}: expected a list of pairs, (placements of the results, "
            f"placements of the arguments)"
        )
    choices = []
    for outputs, inputs in answers:
        tensors = [p for p in inputs if p is not None]
        if len(tensors) != len(call.inputs):
            raise ValueError(f"the rule of {call.name} lays out {len(tensors)} of {len(call.inputs)} tensor arguments")
        choices.append(Choice(tuple(tensors), tuple(outputs)))
    count = len(choices[0].outputs) if choices else len(call.output_shapes())
    return Sharding([*choices, all_replicated(call, count)])


def _is_choice(answer: Any) -> bool:
    return (
        isinstance(answer, (list, tuple))
        and len(answer) == 2
        and all(isinstance(side, (list, tuple)) for side in answer)
        and all(isinstance(p, Placement) for p in answer[0])
        and all(p is None or isinstance(p, Placement) for p in answer[1])
    )
