"""What users need beyond built-in rules: running on local shards, rules of their own, implicit replicas.

Owns ``local_map`` and ``register_sharding``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.tensor._dispatch import forget_decisions
from phalanx.tensor._dtensor import DTensor, _handlers
from phalanx.tensor._modes import implicit_replication
from phalanx.tensor._names import op_name
from phalanx.tensor._placement import Placement, normalize
from phalanx.tensor._rule import Call, Choice, Sharding, all_replicated
from phalanx.tensor._spec import Spec
from phalanx.tensor.rules import RULES

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
) -> Any:
    """``func`` on this rank's parts: DTensors go in as local tensors, results come out as DTensors.

    ``out_placements``: placements of the result (a list), or a tuple of such lists, one per result (None: not a
    tensor). ``in_placements``: what each argument must have; another layout is an error unless
    ``redistribute_inputs``. ``in_grad_placements``: how the gradient of each local argument is laid out.

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
        )
    inner = func

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        meshes: list[DeviceMesh] = []
        if in_placements is not None and len(in_placements) != len(args):
            raise ValueError(f"local_map got {len(args)} arguments for {len(in_placements)} in_placements")
        local_args = []
        for i, arg in enumerate(args):
            wanted = None if in_placements is None else in_placements[i]
            grads = None if in_grad_placements is None else in_grad_placements[i]
            local_args.append(_to_local(i, arg, wanted, grads, redistribute_inputs, meshes))
        result = inner(*local_args, **kwargs)
        mesh = device_mesh or (meshes[0] if meshes else None)
        return result if mesh is None else _from_local(result, out_placements, mesh)

    return wrapper


def _to_local(
    i: int, arg: Any, wanted: Placements, grads: Placements, move: bool, meshes: list[DeviceMesh]
) -> Any:
    if not isinstance(arg, DTensor):
        if isinstance(arg, Tensor) and wanted is not None:
            raise ValueError(
                f"local_map argument {i} is a plain tensor, but in_placements asks for {list(wanted)}"
            )
        return arg
    meshes.append(arg.device_mesh)
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


def _from_local(result: Any, placements: Any, mesh: DeviceMesh) -> Any:
    if isinstance(result, tuple):
        if not isinstance(placements, tuple) or len(placements) != len(result):
            raise ValueError(
                f"local_map: {len(result)} results need a tuple of as many out_placements, got {placements}"
            )
        return tuple(_from_local(r, p, mesh) for r, p in zip(result, placements, strict=True))
    if placements is None or not isinstance(result, Tensor):
        return result
    if isinstance(placements, tuple) and len(placements) == 1 and not isinstance(placements[0], Placement):
        placements = placements[0]
    return DTensor.from_local(result, mesh, placements)


def register_sharding(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function (or several) a sharding rule for one mesh axis.

    The decorated function gets the call's arguments, with a ``Spec`` (shape, dtype, placements) in place of each
    DTensor, and returns a list of choices: (placements of the results, placements of the arguments; None for
    arguments that are not tensors). Full replication is always a choice. ``op`` is anything that dispatches through
    ``__torch_function__``.

    >>> @register_sharding(my_gelu)                               # doctest: +SKIP
    ... def rule(x):
    ...     return [([Shard(d)], [Shard(d)]) for d in range(len(x.shape))]
    """
    ops = list(op) if isinstance(op, (list, tuple)) else [op]

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        for one in ops:
            RULES[op_name(one).base] = functools.partial(_ask, rule)
            _handlers.pop(one, None)
        forget_decisions()
        return rule

    return decorate


def _ask(rule: Callable[..., Any], call: Call) -> Sharding:
    specs: dict[int, Spec] = {one.index: one.spec for one in call.inputs}

    def seen(value: Any) -> Any:
        return specs[value.index] if hasattr(value, "index") and hasattr(value, "spec") else value

    answers = rule(*map(seen, call.args), **{k: seen(v) for k, v in call.kwargs.items()})
    choices = []
    for outputs, inputs in answers:
        tensors = [p for p in inputs if p is not None]
        if len(tensors) != len(call.inputs):
            raise ValueError(
                f"the rule of {call.name} lays out {len(tensors)} of {len(call.inputs)} tensor arguments"
            )
        choices.append(Choice(tuple(tensors), tuple(outputs)))
    count = len(choices[0].outputs) if choices else len(call.output_shapes())
    return Sharding([*choices, all_replicated(call, count)])
