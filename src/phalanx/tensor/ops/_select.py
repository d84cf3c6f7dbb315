"""Choosing layouts: of all combinations of a rule's choices over the mesh axes, the one that sends the fewest bytes.

Owns ``select``. Pure: every rank computes the same answer, because costs are those of the mesh's origin (see
``_plan.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from phalanx.tensor.layout._placement import Partial, Placement, Shard
from phalanx.tensor.ops._rule import Choice, In, Sharding
from phalanx.tensor.redistribute._plan import least_cost, plan_redistribute
from phalanx.tensor.redistribute._search import LATENCY_BYTES

MAX_COMBINATIONS = 96

Layouts = tuple[list[tuple[Placement, ...]], list[tuple[Placement, ...]]]


def select(inputs: Sequence[In], sharding: Sharding, keep: tuple[Placement, ...] | None) -> Layouts | None:
    """Placements per input and per output; None if no combination is valid.

    ``keep``: the placements that the first input and the first output must have (in-place operations).
    """
    num_axes = len(inputs[0].spec.placements)
    per_axis = []
    for axis in range(num_axes):
        allowed = [c for c in sharding.choices if keep is None or _keeps(c, keep[axis])]
        if not allowed:
            return None
        per_axis.append(sorted(allowed, key=lambda c: _estimate(inputs, c, axis)))
    width = max(1, int(MAX_COMBINATIONS ** (1 / num_axes)))
    best: tuple[float, Layouts] | None = None
    for combination in itertools.product(*(choices[:width] for choices in per_axis)):
        layouts = _transpose(combination, len(inputs))
        if not _fits(inputs, layouts[0]) or (sharding.valid is not None and not sharding.valid(layouts[0])):
            continue
        cost = _cost(inputs, layouts[0], math.inf if best is None else best[0])
        if best is None or cost < best[0]:
            best = (cost, layouts)
            if cost == 0:  # nothing moves
                break
    if best is not None or width >= max(map(len, per_axis)):
        return None if best is None else best[1]
    return _first_valid(inputs, sharding, per_axis)


def _cost(inputs: Sequence[In], layouts: Sequence[tuple[Placement, ...]], limit: float) -> float:
    """Say what moving the inputs costs; no plan is searched for that cannot bring it below ``limit``."""
    moves = [
        (one.spec, one.spec.with_placements(placements))
        for one, placements in zip(inputs, layouts, strict=True)
        if placements != one.spec.placements
    ]
    cost = float(len(moves))
    for source, target in moves:
        if cost + least_cost(source, target) >= limit:
            return math.inf
        cost += plan_redistribute(source, target).cost
        if any(a.is_shard() and b.is_partial() for a, b in zip(source.placements, target.placements, strict=True)):
            # sends nothing now, but all of it later
            cost += LATENCY_BYTES + source.num_elements * source.dtype.itemsize
    return cost


def _first_valid(inputs: Sequence[In], sharding: Sharding, per_axis: list[list[Choice]]) -> Layouts | None:
    """Return the cheap combinations were all vetoed: take the first that is not."""
    for combination in itertools.islice(itertools.product(*per_axis), 10_000):
        layouts = _transpose(combination, len(inputs))
        if _fits(inputs, layouts[0]) and (sharding.valid is None or sharding.valid(layouts[0])):
            return layouts
    return None


def _fits(inputs: Sequence[In], placements: Sequence[tuple[Placement, ...]]) -> bool:
    return all(
        not isinstance(p, Shard) or p.dim < one.ndim
        for one, given in zip(inputs, placements, strict=True)
        for p in given
    )


def _keeps(choice: Choice, placement: Placement) -> bool:
    return choice.inputs[0] is placement and choice.outputs[0] is placement


def _transpose(combination: Sequence[Choice], num_inputs: int) -> Layouts:
    ins = [tuple(choice.inputs[i] for choice in combination) for i in range(num_inputs)]
    outs = [tuple(choice.outputs[i] for choice in combination) for i in range(len(combination[0].outputs))]
    return ins, outs


def _estimate(inputs: Sequence[In], choice: Choice, axis: int) -> float:
    total = 0.0
    for one, after in zip(inputs, choice.inputs, strict=True):
        before = one.spec.placements[axis]
        if before is after:
            continue
        size = float(one.spec.num_elements * one.spec.dtype.itemsize) + 4096
        if isinstance(before, Partial):
            total += size * (1 if isinstance(after, Shard) else 2)
        elif isinstance(before, Shard):
            total += size / one.spec.mesh.shape[axis] if isinstance(after, Shard) else size
        else:
            total += 1 + 0.01 * size
    return total
