"""The cheapest steps from one layout to another: a pure search, the same on every rank.

Owns ``cheapest``: which change of one axis is exact and by which collective (``kind_of``), and what that costs.

A step is offered where it is exact: an axis may gather, scatter or exchange a dim if no later axis shards that dim
(later axes shard what earlier ones left, so the innermost shard is undone first and made last), or if its shard is
strided such that the later ones, even, lie inside of it (``inner_shard``). The search is A* over the placements of
either layout, Replicate, and every dim as a place to put a shard aside: (S(0), S(0)) becomes (R, S(0)) with fewer bytes
by way of (S(0), S(1)). Costs are those of the rank at the mesh's origin, which never holds less than others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from phalanx.tensor.layout._placement import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    StridedShard,
    held_size,
    inner_shard,
)

LATENCY_BYTES = 4096  # what one more collective costs, in bytes
LOCAL_FACTOR = 0.01  # what touching a byte locally costs against sending it
LOCAL_KINDS = ("slice", "split", "pad", "relabel")
PADDED = (
    "sum",
    "product",
)  # a shard becomes partial in place: the rest of each contribution is what changes nothing
MAX_LAYOUTS = 20_000  # more intermediate layouts than this are not looked at

Placements = tuple[Placement, ...]
Found = list[tuple[str, int, Placements]]  # kind, axis, placements after it


def step_bytes(kind: str, before: int, after: int) -> int:
    """Say what comm counts for a step, of this rank's bytes before and after it."""
    return 0 if kind in LOCAL_KINDS else max(before, after)


def step_cost(kind: str, before: int, after: int) -> float:
    if kind in LOCAL_KINDS:
        return 1 + LOCAL_FACTOR * max(before, after)
    return LATENCY_BYTES + max(before, after) * (2.0 if kind == "all_reduce" else 1.0)


class Grid:
    """What the search needs to know of a tensor: the mesh's shape, the tensor's, and the size of an element."""

    def __init__(self, mesh_shape: Sequence[int], shape: Sequence[int], itemsize: int) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.shape = tuple(shape)
        self.itemsize = itemsize
        self._bytes: dict[Placements, int] = {}

    def origin_bytes(self, placements: Placements) -> int:
        found = self._bytes.get(placements)
        if found is None:
            cuts: list[list[tuple[Shard, int, int]]] = [[] for _ in self.shape]
            for size, p in zip(self.mesh_shape, placements, strict=True):
                if isinstance(p, Shard):
                    cuts[p.dim].append((p, size, 0))
            elements = math.prod(held_size(n, shard) for n, shard in zip(self.shape, cuts, strict=True))
            found = self._bytes[placements] = elements * self.itemsize
        return found


def kind_of(grid: Grid, placements: Placements, axis: int, after: Placement) -> str | None:
    """Return the collective that makes this change exactly; None if none does."""
    before = placements[axis]
    if grid.mesh_shape[axis] == 1:
        return "relabel"  # all placements are the same there
    for end in (before, after):
        if isinstance(end, Partial) and not all(_commute(end, later) for later in placements[axis + 1 :]):
            return None
        if isinstance(end, Shard):
            changed = (*placements[:axis], end, *placements[axis + 1 :])
            if inner_shard(grid.shape[end.dim], grid.mesh_shape, changed, axis) is None:
                return None
    if isinstance(before, Partial):
        if isinstance(after, Partial):
            return "relabel" if before.reduce_op == after.reduce_op else None
        return "reduce_scatter" if isinstance(after, Shard) else "all_reduce"
    if isinstance(before, Shard):
        if isinstance(after, Partial):
            return "pad" if after.reduce_op in PADDED else None
        return "all_to_all" if isinstance(after, Shard) else "all_gather"
    return "split" if isinstance(after, Partial) else "slice"


def _commute(one: Partial, later: Placement) -> bool:
    """Return whether it does not matter which of two reductions comes first."""
    return (
        not isinstance(later, Partial)
        or one.reduce_op == later.reduce_op
        or {one.reduce_op, later.reduce_op} == {"sum", "avg"}
    )


def cheapest(grid: Grid, source: Placements, target: Placements) -> Found:
    """Return the steps of least cost. Ties go to fewer steps, then to the order of the axes."""
    ends = [tuple(dict.fromkeys((a, b, REPLICATE))) for a, b in zip(source, target, strict=True)]
    cost, found = _search(grid, source, target, ends, math.inf)
    if all(kind in LOCAL_KINDS for kind, _, _ in found):
        return found
    wide = [(*own, *_asides(grid, source, target, axis)) for axis, own in enumerate(ends)]
    options = [tuple(dict.fromkeys(choices)) for choices in wide]
    if math.prod(map(len, options)) > MAX_LAYOUTS:
        return found
    return _search(grid, source, target, options, cost)[1] or found


def _asides(grid: Grid, source: Placements, target: Placements, axis: int) -> Iterator[Placement]:
    """Shards that ``axis`` may make for a while: of every dim, and around those that later axes have or will make."""
    if grid.mesh_shape[axis] == 1:
        return
    for dim in range(len(grid.shape)):
        yield Shard(dim)
        for end in (source, target):
            later = zip(end[axis + 1 :], grid.mesh_shape[axis + 1 :], strict=True)
            factor = math.prod(size for p, size in later if p.is_shard(dim))
            if factor > 1:
                yield StridedShard(dim, factor)


def _search(
    grid: Grid, source: Placements, target: Placements, options: Sequence[Placements], bound: float
) -> tuple[float, Found]:
    """A*, of plans cheaper than ``bound``; no steps if there are none."""
    least = LeastCost(grid, target)
    order = itertools.count()
    queue: list[tuple[float, int, int, float, Placements, Found]] = [(least(source), 0, next(order), 0.0, source, [])]
    best = {source: 0.0}
    while queue:
        _, length, _, cost, now, found = heapq.heappop(queue)
        if now == target:
            return cost, found
        if cost > best[now]:
            continue
        for kind, axis, after in _steps_from(grid, now, options):
            total = cost + step_cost(kind, grid.origin_bytes(now), grid.origin_bytes(after))
            if total < best.get(after, bound):
                promise = total + least(after)
                if promise < bound:
                    best[after] = total
                    entry = (promise, length + 1, next(order), total, after, [*found, (kind, axis, after)])
                    heapq.heappush(queue, entry)
    assert bound < math.inf, f"no plan from {source} to {target}: Replicate is reachable from everywhere"
    return bound, []


class LeastCost:
    """What a plan from here to ``target`` costs at least.

    Each axis that is not as wanted needs a step, and a collective to stop being sharded or partial, unless to become
    partial. No collective carries less than the smallest shard there is, and the one that last makes the shard grow
    carries all of the wanted shard (where only collectives can make it grow).
    """

    def __init__(self, grid: Grid, target: Placements) -> None:
        self.grid, self.target = grid, target
        self.wanted = grid.origin_bytes(target)
        self.smallest = math.prod(grid.shape) * grid.itemsize // math.prod(grid.mesh_shape)
        self.pads = any(isinstance(p, Partial) and p.reduce_op in PADDED for p in target)

    def __call__(self, placements: Placements) -> float:
        collectives = local = 0
        for now, wanted, size in zip(placements, self.target, self.grid.mesh_shape, strict=True):
            if now != wanted:
                stays = size == 1 or now.is_replicate() or wanted.is_partial()
                local += stays
                collectives += not stays
        total = local + collectives * (LATENCY_BYTES + self.smallest)
        if collectives and not self.pads and self.grid.origin_bytes(placements) < self.wanted:
            return total + self.wanted - self.smallest
        return total


def _steps_from(grid: Grid, now: Placements, options: Sequence[Placements]) -> Iterator[tuple[str, int, Placements]]:
    for axis, choices in enumerate(options):
        for after in choices:
            if after != now[axis]:
                kind = kind_of(grid, now, axis, after)
                if kind is not None:
                    yield kind, axis, (*now[:axis], after, *now[axis + 1 :])
