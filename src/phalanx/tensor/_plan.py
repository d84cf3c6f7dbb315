"""Which collectives turn one layout into another: a pure planner, searching for the fewest bytes.

Owns ``Step``, ``Plan`` and ``plan_redistribute``. A step changes the placement on one mesh axis; ``_execute.py``
runs it.

A step is only offered where it is exact: an axis may gather, scatter or exchange a dim only if no later axis cuts that
dim (later axes cut what earlier ones left, so the innermost cut is undone first and made last). The search is
Dijkstra's over the placements that occur in either layout and Replicate. Every rank must find the same plan, so its
costs are those of the rank at the mesh's origin, which never holds less than others; the promise of bytes is this
rank's own.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.tensor._placement import REPLICATE, Partial, Placement, Shard
from phalanx.tensor._spec import Spec

LATENCY_BYTES = 4096  # what one more collective costs, in bytes
LOCAL_FACTOR = 0.01  # what touching a byte locally costs against sending it


@dataclass(frozen=True)
class Step:
    """One placement change on one axis; ``kind`` names the collective, or a local action."""

    kind: str
    axis: int
    source: Spec
    target: Spec

    @property
    def nbytes(self) -> int:
        """Bytes on the larger side of the collective on this rank; zero for local actions."""
        return _step_bytes(self.kind, self.source.local_bytes, self.target.local_bytes)

    @property
    def cost(self) -> float:
        origin = (0,) * self.source.mesh.ndim
        itemsize = self.source.dtype.itemsize
        before = math.prod(self.source.shape_at(origin)) * itemsize
        after = math.prod(self.target.shape_at(origin)) * itemsize
        sent = _step_bytes(self.kind, before, after)
        if not sent and self.kind in LOCAL_KINDS:
            return 1 + LOCAL_FACTOR * max(before, after)
        return LATENCY_BYTES + sent * (2.0 if self.kind == "all_reduce" else 1.0)

    def __repr__(self) -> str:
        change = f"{self.source.placements[self.axis]!r}->{self.target.placements[self.axis]!r}"
        return f"{self.kind}(axis={self.axis}, {change}, {self.nbytes} B)"


LOCAL_KINDS = ("slice", "split", "relabel")


def _step_bytes(kind: str, before: int, after: int) -> int:
    return 0 if kind in LOCAL_KINDS else max(before, after)


@dataclass(frozen=True)
class Plan:
    """The steps from ``source`` to ``target``; prints as one line.

    >>> print(plan_redistribute(shard0, replicated))   # doctest: +SKIP
    all_gather(axis=0, S(0)->R, 1024 B)
    """

    source: Spec
    target: Spec
    steps: tuple[Step, ...]
    actions: list[Any] = field(
        default_factory=list, compare=False, repr=False
    )  # the executor's, see _steps.py

    @property
    def nbytes(self) -> int:
        """Bytes that comm will count on this rank."""
        return sum(step.nbytes for step in self.steps)

    @property
    def cost(self) -> float:
        """What the planner minimised; the same on every rank."""
        return sum(step.cost for step in self.steps)

    @property
    def communicates(self) -> bool:
        return any(step.kind not in LOCAL_KINDS for step in self.steps)

    @property
    def is_relabel(self) -> bool:
        """Whether every rank's part stays as it is: on axes of one rank all placements are the same."""
        return all(step.kind == "relabel" for step in self.steps)

    def __repr__(self) -> str:
        return "; ".join(map(repr, self.steps)) or "nothing"


def plan_redistribute(source: Spec, target: Spec) -> Plan:
    """The cheapest exact plan. Source and target differ in placements only."""
    key = ("plan", target)
    found: Plan | None = source.variants.get(key)
    if found is None:
        if source.mesh != target.mesh or source.shape != target.shape:
            raise ValueError(f"cannot plan from {source!r} to {target!r}: mesh and shape must agree")
        found = source.variants[key] = Plan(source, target, tuple(_search(source, target)))
    return found


def _search(source: Spec, target: Spec) -> list[Step]:
    if source is target:
        return []
    wanted = target.placements
    options = [
        tuple(dict.fromkeys((source.placements[axis], wanted[axis], REPLICATE)))
        for axis in range(source.mesh.ndim)
    ]
    order = itertools.count()
    queue: list[tuple[float, int, int, Spec, list[Step]]] = [(0.0, 0, next(order), source, [])]
    done: set[tuple[Placement, ...]] = set()
    while queue:
        cost, length, _, spec, steps = heapq.heappop(queue)
        if spec.placements == wanted:
            return steps
        if spec.placements in done:
            continue
        done.add(spec.placements)
        for step in _steps_from(spec, options):
            total = cost + step.cost
            heapq.heappush(queue, (total, length + 1, next(order), step.target, [*steps, step]))
    raise AssertionError(f"no plan from {source!r} to {target!r}: Replicate is reachable from everywhere")


def _steps_from(spec: Spec, options: Sequence[tuple[Placement, ...]]) -> Iterator[Step]:
    now = spec.placements
    for axis, choices in enumerate(options):
        for after in choices:
            if after == now[axis]:
                continue
            alone = spec.mesh.shape[axis] == 1  # then all placements are the same
            kind = "relabel" if alone else _kind(now, axis, now[axis], after)
            if kind is not None:
                yield Step(kind, axis, spec, spec.with_placements((*now[:axis], after, *now[axis + 1 :])))


def _kind(placements: tuple[Placement, ...], axis: int, before: Placement, after: Placement) -> str | None:
    """The collective that makes this change exactly; None if none does."""
    later = placements[axis + 1 :]
    for end in (before, after):
        if isinstance(end, Shard) and any(isinstance(p, Shard) and p.dim == end.dim for p in later):
            return None
    if isinstance(before, Partial):
        if isinstance(after, Partial):
            return "relabel" if before.reduce_op == after.reduce_op else None
        if isinstance(after, Shard):
            return "reduce_scatter" if type(after) is Shard else None
        return "all_reduce"
    if isinstance(before, Shard):
        if isinstance(after, Partial):
            return None
        if isinstance(after, Shard):
            plain = type(before) is Shard and type(after) is Shard and before.dim != after.dim
            return "all_to_all" if plain else None
        return "all_gather"
    return "split" if isinstance(after, Partial) else "slice"
