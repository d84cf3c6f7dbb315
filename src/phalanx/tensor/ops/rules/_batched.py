"""Functions of matrices, planes and rows, one for each element of a batch: the batch may be sharded.

Owns the rules for linear algebra, sampling, unpooling and other functions whose last dims belong together, and for
pairs of tensors that meet along one dim. Batch dims are broadcast. What a function makes of linear arguments may stay a
partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.tensor.layout._placement import LINEAR_OPS, PARTIAL_SUM, REPLICATE, Partial, Placement, Shard
from phalanx.tensor.ops._rule import CANNOT_TELL, Call, Choice, In, Rule, Sharding, all_replicated, norm_dim
from phalanx.tensor.ops.rules._pointwise import broadcast_shape


def batched(*cores: int, linear: int = -1) -> Rule:
    """Make the rule of a function that takes the last ``cores[i]`` dims of input i together.

    ``linear``: the input that may be a partial sum, with a first result that is so too; others do not depend on it.
    """

    def rule(call: Call) -> Sharding | None:
        return _batched(call, cores, linear) if len(call.inputs) <= len(cores) else None

    return rule


def solve(call: Call) -> Sharding | None:
    """``linalg.solve(A, B)``: B holds vectors if it has A's batch and rows, or one dim."""
    if len(call.inputs) != 2:
        return None
    left, right = call.inputs
    vectors = right.ndim == 1 or right.shape == left.shape[:-1]
    return _batched(call, (2, 1 if vectors else 2), 1) if call.arg(2, "left", True) or not vectors else None


def _batched(call: Call, cores: Sequence[int], linear: int) -> Sharding | None:
    counts = [one.ndim - core for one, core in zip(call.inputs, cores, strict=False)]
    if min(counts) < 0:
        return None
    try:
        batch = broadcast_shape([one.shape[:count] for one, count in zip(call.inputs, counts, strict=True)])
        outputs = call.output_shapes()
    except CANNOT_TELL:  # torch's refusal is the one to give
        return None
    choices = []
    for dim, size in enumerate(batch):
        if all(len(shape) > dim and shape[dim] == size for shape in outputs):
            inputs = tuple(
                _along(one, dim - (len(batch) - count), size) for one, count in zip(call.inputs, counts, strict=True)
            )
            choices.append(Choice(inputs, (Shard(dim),) * len(outputs)))
    return _with_partial(call, choices, linear, len(outputs))


def _along(one: In, dim: int, size: int) -> Placement:
    return REPLICATE if dim < 0 or one.shape[dim] != size else Shard(dim)


def _with_partial(call: Call, choices: list[Choice], linear: int, num_outputs: int) -> Sharding:
    choices = sorted(choices, key=lambda c: -sum(p in one.spec.placements for p, one in _meeting(c, call)))
    if 0 <= linear < len(call.inputs):
        for op in LINEAR_OPS:
            if any(p.is_partial(op) for p in call.inputs[linear].spec.placements):
                inputs = tuple(Partial(op) if i == linear else REPLICATE for i in range(len(call.inputs)))
                choices.append(Choice(inputs, (Partial(op), *(REPLICATE,) * (num_outputs - 1))))
    return Sharding([*choices, all_replicated(call, num_outputs)])


def _meeting(choice: Choice, call: Call) -> list[tuple[Placement, In]]:
    return list(zip(choice.inputs, call.inputs, strict=True))


def pairs(position: int, default: int | None, *, removed: bool, linear: int = -1) -> Rule:
    """Make the rule of a function of tensors that are broadcast and meet along one dim, which an argument names: cross
    products, similarities, integrals. The others may be sharded. ``removed``: the result lacks that dim.
    """

    def rule(call: Call) -> Sharding | None:
        first = call.inputs[0]
        vectors = [one.ndim == 1 < first.ndim for one in call.inputs]  # along that dim, whichever it is
        try:
            shapes = [one.shape for one, is_vector in zip(call.inputs, vectors, strict=True) if not is_vector]
            whole, outputs = broadcast_shape(shapes), call.output_shapes()
        except CANNOT_TELL:
            return None
        given = call.arg(position, "dim", default)
        if given is None:  # the first of size three
            given = next((d for d, size in enumerate(first.shape) if size == 3), None)
        if not isinstance(given, int) or not whole or len(outputs) != 1:
            return None
        dim = norm_dim(given, len(whole))
        choices = []
        for d, size in enumerate(whole):
            if d != dim:
                inputs = tuple(
                    REPLICATE if is_vector else _along(one, d - (len(whole) - one.ndim), size)
                    for one, is_vector in zip(call.inputs, vectors, strict=True)
                )
                choices.append(Choice(inputs, (Shard(d - (removed and d > dim)),)))
        sharding = _with_partial(call, choices, linear, 1)
        if call.arg(position, "dim", default) is None:  # a shard may have three rows elsewhere
            sharding.local = lambda run, args, kwargs: run.func(*args[:position], dim=dim)
        return sharding

    return rule


def same_shape(position: int) -> Rule:
    """Make the rule of a function of tensors of one shape, whose rows along a named dim belong together."""

    def rule(call: Call) -> Sharding | None:
        first = call.inputs[0]
        if any(one.shape != first.shape for one in call.inputs) or not first.ndim:
            return None
        row = norm_dim(call.arg(position, "dim"), first.ndim)
        count = len(call.inputs)
        choices = [Choice((Shard(d),) * count, (Shard(d),)) for d in range(first.ndim) if d != row]
        return _with_partial(call, choices, -1, 1)

    return rule


def grid_sample(call: Call) -> Sharding | None:
    """``grid_sampler(input, grid, ...)``: images with their grids, or channels."""
    if len(call.inputs) != 2 or call.args[:1] != (call.inputs[0],):
        return None
    choices = [Choice((Shard(0), Shard(0)), (Shard(0),)), Choice((Shard(1), REPLICATE), (Shard(1),))]
    return _with_partial(call, choices, 0, 1)


def prelu(call: Call) -> Sharding | None:
    """``prelu(input, weight)``: one weight for all, or one for each channel (dim 1)."""
    first, weight = call.inputs
    choices = []
    for d in range(first.ndim):
        by_channel = d == 1 and weight.spec.num_elements > 1
        choices.append(Choice((Shard(d), Shard(0) if by_channel else REPLICATE), (Shard(d),)))
    return _with_partial(call, choices, -1, 1)


def loss_by_rows(call: Call) -> Sharding | None:
    """Losses of vectors (the last dim of the first inputs), without their reduction: one number for each."""
    first = call.inputs[0]
    try:
        outputs = call.output_shapes()
    except CANNOT_TELL:
        return None
    rows = first.shape[:-1]
    if outputs != [rows] or any(one.shape not in (first.shape, rows) for one in call.inputs):
        return None
    count = len(call.inputs)
    return _with_partial(call, [Choice((Shard(d),) * count, (Shard(d),)) for d in range(len(rows))], -1, 1)


def searched(call: Call) -> Sharding | None:
    """isin, bucketize: every element is looked up on its own, among all that the second argument has."""
    if len(call.inputs) != 2 or call.args[:1] != (call.inputs[0],):
        return None
    choices = [Choice((Shard(d), REPLICATE), (Shard(d),)) for d in range(call.inputs[0].ndim)]
    if call.name == "bucketize":  # how many boundaries are below: of all as many as of their parts together
        choices.append(Choice((REPLICATE, Shard(0)), (PARTIAL_SUM,)))
        if Partial("max") in call.inputs[0].spec.placements:  # (of not-a-number all are: it stays the largest)
            choices.append(Choice((Partial("max"), REPLICATE), (Partial("max"),)))
    return _with_partial(call, choices, -1, 1)
