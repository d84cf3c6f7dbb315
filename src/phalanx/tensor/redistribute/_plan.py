"""Which collectives turn one layout into another, as a value that can be printed and asked for its bytes.

Owns ``RedistributeStep``, ``Plan`` and ``plan_redistribute``. A step changes the placement on one mesh axis;
``_search.py`` finds the cheapest ones, ``_execute.py`` runs them. Every rank finds the same plan; the promise of bytes
is this rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._search import LOCAL_KINDS, Grid, LeastCost, cheapest, step_bytes, step_cost


@dataclass(frozen=True)
class RedistributeStep:
    """One placement change on one axis; ``kind`` names the collective, or a local action."""

    kind: str
    axis: int
    source: Spec
    target: Spec

    @property
    def nbytes(self) -> int:
        """Bytes on the larger side of the collective on this rank; zero for local actions."""
        return step_bytes(self.kind, self.source.local_bytes, self.target.local_bytes)

    @property
    def cost(self) -> float:
        origin = (0,) * self.source.mesh.ndim
        before, after = (math.prod(s.shape_at(origin)) * s.dtype.itemsize for s in (self.source, self.target))
        return step_cost(self.kind, before, after)

    def __repr__(self) -> str:
        change = f"{self.source.placements[self.axis]!r}->{self.target.placements[self.axis]!r}"
        return f"{self.kind}(axis={self.axis}, {change}, {self.nbytes} B)"


@dataclass(frozen=True)
class Plan:
    """The steps from ``source`` to ``target``; prints as one line.

    >>> print(plan_redistribute(shard0, replicated))   # doctest: +SKIP
    all_gather(axis=0, S(0)->R, 1024 B)
    """

    source: Spec
    target: Spec
    steps: tuple[RedistributeStep, ...]
    actions: list[Any] = field(default_factory=list, compare=False, repr=False)  # the executor's, see _steps.py

    @property
    def nbytes(self) -> int:
        """Bytes that comm will count on this rank."""
        return sum(step.nbytes for step in self.steps)

    @property
    def cost(self) -> float:
        """Say what the planner minimised; the same on every rank."""
        return sum(step.cost for step in self.steps)

    @property
    def communicates(self) -> bool:
        return any(step.kind not in LOCAL_KINDS for step in self.steps)

    @property
    def is_relabel(self) -> bool:
        """Whether every rank's shard stays as it is: on axes of one rank all placements are the same."""
        return all(step.kind == "relabel" for step in self.steps)

    def __repr__(self) -> str:
        return "; ".join(map(repr, self.steps)) or "nothing"


def plan_redistribute(source: Spec, target: Spec) -> Plan:
    """Return the cheapest exact plan. Source and target differ in placements only."""
    key = ("plan", target)
    found: Plan | None = source.variants.get(key)
    if found is None:
        if source.mesh != target.mesh or source.shape != target.shape:
            raise ValueError(f"cannot plan from {source!r} to {target!r}: mesh and shape must agree")
        found = source.variants[key] = Plan(source, target, tuple(_steps(source, target)))
    return found


def least_cost(source: Spec, target: Spec) -> float:
    """Say what ``plan_redistribute(source, target).cost`` cannot be below, without a search."""
    return LeastCost(_grid(source), target.placements)(source.placements)


def _grid(spec: Spec) -> Grid:
    return Grid(spec.mesh.shape, spec.shape, spec.dtype.itemsize)


def _steps(source: Spec, target: Spec) -> Iterator[RedistributeStep]:
    before = source
    for kind, axis, placements in cheapest(_grid(source), source.placements, target.placements):
        after = source.with_placements(placements)
        yield RedistributeStep(kind, axis, before, after)
        before = after
