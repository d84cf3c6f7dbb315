"""Element by element: every input sharded alike (where its dim is not broadcast) gives that sharding.

Owns their rule. Some are linear (``Operator.linear``): what is still a partial sum may pass through them. Through those
that only grow or only fall (``Operator.monotone``) a partial maximum or minimum may.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch

from phalanx.tensor.layout._placement import REPLICATE, Partial, Placement, Shard
from phalanx.tensor.ops._rule import Call, Choice, In, Sharding, all_replicated


def broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """Return the shape that torch broadcasts ``shapes`` to."""
    result: torch.Size = torch.broadcast_shapes(*shapes)
    return result


def pointwise(call: Call) -> Sharding | None:
    """Sharded as the inputs are, dim by dim; see the module."""
    shapes = [one.shape for one in call.inputs]
    out = broadcast_shape(shapes)
    if call.in_place and out != shapes[0]:
        raise RuntimeError(
            f"{call.name}_ on a DTensor of shape {tuple(shapes[0])}: the arguments broadcast to {tuple(out)}"
        )
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return None  # it gives indices
    choices = [all_replicated(call, 1)]
    found = {p.dim + len(out) - one.ndim for one in call.inputs for p in one.spec.placements if isinstance(p, Shard)}
    dims = sorted(d for d in found if out[d] > 1 or len(shapes) == 1)
    choices[:0] = [c for d in dims for c in shard_choices(call, d, out, 1)]
    choices += [*_linear_choices(call), *_monotone_choices(call)]
    if call.op.makes_anew:
        value = (REPLICATE,) * (len(call.inputs) - 1)  # what full_like fills with
        choices += [
            Choice((p, *value), (REPLICATE if p.is_partial() else p,))
            for p in dict.fromkeys(call.inputs[0].spec.placements)
        ]
        choices = [c for c in choices if not c.outputs[0].is_partial() or call.in_place]
    made = None if call.in_place else [torch.Size(out)]
    return Sharding(choices, shapes=made, is_view=call.op.aliasing == "view", elementwise=True)


def shard_choices(call: Call, dim: int, out: torch.Size, num_outputs: int) -> list[Choice]:
    """Lay all inputs out as sharded along output dim ``dim``, replicated where they have no such dim or broadcast it.

    One choice for each kind of shard that occurs (plain, strided).
    """
    ways: dict[Placement, None] = {}
    for one in call.inputs:
        for p in one.spec.placements:
            if isinstance(p, Shard) and p.dim + len(out) - one.ndim == dim:
                ways[p if p.dim == dim else p.on_dim(dim)] = None
    result = []
    for way in ways or {Shard(dim): None}:
        assert isinstance(way, Shard), "only shards were collected"
        inputs: list[Placement] = []
        for one in call.inputs:
            own = dim - (len(out) - one.ndim)
            if own < 0 or (one.shape[own] == 1 and out[dim] != 1):
                inputs.append(REPLICATE)
            else:
                inputs.append(way if own == dim else way.on_dim(own))
        result.append(Choice(tuple(inputs), (way,) * num_outputs))
    return result


def _linear_choices(call: Call) -> list[Choice]:
    """Inputs that are partial together, and a result that is so too."""
    sets, is_cast = _sets(call), call.op.cast != ""
    if not sets or not _is_linear_in_numbers(call):
        return []
    unchanged = is_cast and not call.in_place and _cast_to(call) is call.inputs[0].dtype
    if is_cast and not unchanged and not _stays_inexact(call):
        return []
    ops = {p.reduce_op for one in call.inputs for p in one.spec.placements if isinstance(p, Partial)}
    choices = []
    any_op = unchanged or call.op.linear == "identity"
    for op in sorted(ops if any_op else ops & {"sum", "avg"}):
        partial = Partial(op)
        for together in sets:
            if max(together) >= len(call.inputs):
                continue
            if call.kwargs.get("rounding_mode") is not None:
                continue
            inputs = tuple(partial if i in together else REPLICATE for i in range(len(call.inputs)))
            choices.append(Choice(inputs, (partial,)))
    return choices


_OPPOSITE = {"max": "min", "min": "max"}


def _monotone_choices(call: Call) -> list[Choice]:
    """One input partial by maximum or minimum, and so the result: by the same where it grows, by the other where it
    falls. Not-a-number stays one in all of them, or becomes what no other contribution exceeds (``Operator.passes``).
    """
    known = [call.op.passes] if call.op.passes else list(_OPPOSITE)
    ops = [op for op in known if any(p.is_partial(op) for one in call.inputs for p in one.spec.placements)]
    signs = call.op.monotone or ("+" if call.op.cast and _keeps_order(call) else "")
    if not ops or not signs or (len(signs) == 2 and len(call.args) > 2) or call.needs_grad:
        return []  # (they have no gradient)
    choices = []
    for op in ops:
        for one in call.inputs:
            place = _place(call, one)
            if place < len(signs) and not (place and "alpha" in call.kwargs):
                inputs = tuple(Partial(op) if other is one else REPLICATE for other in call.inputs)
                choices.append(Choice(inputs, (Partial(op if signs[place] == "+" else _OPPOSITE[op]),)))
        if call.op.joins == op:
            choices.append(Choice((Partial(op),) * len(call.inputs), (Partial(op),)))
    return choices


def _place(call: Call, one: In) -> int:
    """Say at which position among the arguments an input stands, also one that is given by name."""
    by_name = [_PLACES.get(name, len(_PLACES)) for name, value in call.kwargs.items() if value is one]
    return next((place for place, arg in enumerate(call.args) if arg is one), by_name[0] if by_name else len(_PLACES))


_PLACES = {"input": 0, "other": 1, "min": 1, "max": 1}


def _keeps_order(call: Call) -> bool:
    """Return whether a cast is one between floating dtypes: rounding keeps the order."""
    after = None if call.in_place else _cast_to(call)
    return after is not None and after.is_floating_point and call.inputs[0].dtype.is_floating_point


def _is_linear_in_numbers(call: Call) -> bool:
    """Return whether numbers among the arguments leave sums as they are: infinities of both signs do not add up to the
    infinity that the sum has. Not-a-number is the same either way.
    """
    numbers: list[Any] = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Number)]
    if call.op.linear == "dividend" and 0 in numbers:
        return False
    return not any(cmath.isinf(number) for number in numbers if not isinstance(number, int))


# The tensor arguments that may be partial together (the others replicated), by ``Operator.linear``. Where a constant
# second argument would be added, both are tensors.
_SETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "": (),
    "first": ((0,),),
    "identity": ((0,),),
    "dividend": ((0,),),
    "either": ((0,), (1,)),
    "both": ((0, 1),),
}


def _sets(call: Call) -> tuple[tuple[int, ...], ...]:
    if call.op.linear != "values":
        return _SETS[call.op.linear]
    # the condition is the first argument of torch.where and the second of Tensor.where
    values = tuple(i for i, one in enumerate(call.inputs) if one.dtype.is_floating_point)
    return (values,) if len(call.inputs) == 3 and len(values) == 2 else ()


def _stays_inexact(call: Call) -> bool:
    """Return whether a cast keeps a floating or complex dtype (casting a sum to integers is not linear)."""
    if call.in_place:
        kinds = {one.dtype for one in call.inputs}
        return len(kinds) == 1 and all(kind.is_floating_point for kind in kinds)
    before, after = call.inputs[0].dtype, _cast_to(call)
    if after is None or after.itemsize < before.itemsize:
        return False  # rounding each contribution is not rounding the sum
    return (before.is_floating_point and (after.is_floating_point or after.is_complex)) or (
        before.is_complex and after.is_complex
    )


def _cast_to(call: Call) -> torch.dtype | None:
    """Return the dtype of a cast; None if it is given by name."""
    given = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)]
    if given or call.name == "type":
        return given[0] if given else None
    named = call.op.cast
    return named if isinstance(named, torch.dtype) else call.inputs[-1].dtype
