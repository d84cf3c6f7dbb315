"""The cheapest plan, found the slow way: the rows that ranks hold decide what a step can do; every layout is tried.

A step changes the placement of one axis. It is possible if each rank's new part is in what the ranks along that axis
hold together (in its own part, if it was partial). Shares the price list with the planner, and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from phalanx.tensor import Partial, Placement, Replicate, Shard
from phalanx.tensor.layout._placement import indices_of
from phalanx.tensor.redistribute._search import step_cost

Layout = tuple[Placement, ...]
Sizes = tuple[int, ...]


class RankGrid:
    """As much of a mesh as a plan needs; this rank is the first."""

    mesh_dim_names = None

    def __init__(self, shape: Sizes) -> None:
        self.shape, self.ndim = shape, len(shape)

    def get_coordinate(self) -> Sizes:
        return (0,) * self.ndim

    def get_rank(self) -> int:
        return 0


@lru_cache(maxsize=20_000)
def held(mesh: Sizes, shape: Sizes, layout: Layout) -> dict[Sizes, list[frozenset[int]]]:
    """Coordinate -> the indices that are held there of each dim."""

    def of_dim(dim: int, where: Sizes) -> frozenset[int]:
        cuts = [(p, mesh[axis], where[axis]) for axis, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim]
        return frozenset(indices_of(shape[dim], cuts))

    return {where: [of_dim(dim, where) for dim in range(len(shape))] for where in itertools.product(*map(range, mesh))}


@lru_cache(maxsize=100_000)
def kind_of(mesh: Sizes, shape: Sizes, now: Layout, axis: int, wanted: Placement) -> str | None:
    """The collective that changes the placement of ``axis``, or a local action; None if there is none."""
    before, after = now[axis], wanted
    parts, wanted_parts = held(mesh, shape, now), held(mesh, shape, _changed(now, axis, wanted))
    if mesh[axis] == 1:
        return "relabel"
    partials = [
        {end.reduce_op, p.reduce_op}
        for end in (before, after)
        for p in now[axis + 1 :]
        if isinstance(end, Partial) and isinstance(p, Partial)
    ]  # later axes are reduced first
    if any(len(ops) == 2 and ops != {"sum", "avg"} for ops in partials):
        return None
    if isinstance(before, Partial) and isinstance(after, Partial):
        return "relabel" if before.reduce_op == after.reduce_op else None
    padded = after.is_partial("sum") or after.is_partial("product")
    if after.is_partial() and not before.is_replicate() and not padded:
        return None
    for where, part in wanted_parts.items():
        ranks = [(*where[:axis], i, *where[axis + 1 :]) for i in range(mesh[axis])]
        for dim, rows in enumerate(part):
            reach = parts[where][dim].union(*(parts[r][dim] for r in ranks if not before.is_partial()))
            if not (rows == reach if after.is_partial() else rows <= reach):
                return None
    if before.is_partial():
        return "all_reduce" if after.is_replicate() else "reduce_scatter"
    if after.is_partial() or before.is_replicate():
        return "slice"
    return "all_gather" if after.is_replicate() else "all_to_all"


def _changed(layout: Layout, axis: int, placement: Placement) -> Layout:
    return (*layout[:axis], placement, *layout[axis + 1 :])


def cheapest_cost(
    mesh: Sizes, shape: Sizes, itemsize: int, source: Layout, target: Layout, asides: Sequence[Placement] = ()
) -> float:
    """Dijkstra over the placements of both ends, Replicate, every plain cut, and ``asides``."""
    anywhere = [Replicate(), *(Shard(dim) for dim in range(len(shape))), *asides]
    order = itertools.count()
    queue: list[tuple[float, int, Layout]] = [(0.0, next(order), source)]
    done: set[Layout] = set()
    while queue:
        cost, _, now = heapq.heappop(queue)
        if now == target:
            return cost
        if now in done:
            continue
        done.add(now)
        for axis in range(len(mesh)):
            for wanted in dict.fromkeys((*anywhere, source[axis], target[axis])):
                kind = kind_of(mesh, shape, now, axis, wanted) if wanted != now[axis] else None
                if kind is not None:
                    after = _changed(now, axis, wanted)
                    step = step_cost(kind, _bytes(mesh, shape, now) * itemsize, _bytes(mesh, shape, after) * itemsize)
                    heapq.heappush(queue, (cost + step, next(order), after))
    raise AssertionError(f"no plan from {source} to {target}")


def _bytes(mesh: Sizes, shape: Sizes, layout: Layout) -> int:
    return math.prod(map(len, held(mesh, shape, layout)[(0,) * len(mesh)]))


def layouts(mesh: Sizes, shape: Sizes, others: Sequence[Placement]) -> list[Layout]:
    """Every combination of Replicate, plain cuts and ``others``."""
    options = [Replicate(), *(Shard(dim) for dim in range(len(shape))), *others]
    return list(itertools.product(options, repeat=len(mesh)))


def pairs(found: Sequence[Layout], rng: Any, number: int | None) -> Iterator[tuple[Layout, Layout]]:
    """All pairs, or ``number`` of them."""
    every = list(itertools.product(found, repeat=2))
    yield from every if number is None or number >= len(every) else rng.sample(every, number)
