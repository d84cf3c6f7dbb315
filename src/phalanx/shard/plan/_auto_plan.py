"""Finds a plan that balances bytes: which parameters to shard, and how, so that every rank stays under a budget.

Owns the decisions, as pure functions of names, sizes and kinds. Embedding tables that are large beside a rank's fair
share are sharded by rows over all ranks, smaller ones go undivided to the rank with the least; weights of linear layers
are sharded along their longer dim; everything else stays on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx._devices import is_host, of
from phalanx.comm import DeviceMesh
from phalanx.shard.layout._boxes import chunk_lengths
from phalanx.shard.plan._sharding_plan import ShardingPlan
from phalanx.shard.tensor._sharding_spec import ChunkShardingSpec


class Candidate(NamedTuple):
    """A parameter that can be sharded."""

    name: str
    kind: str  # "embedding" or "linear"
    shape: tuple[int, int]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.itemsize


class ShardingChoice(NamedTuple):
    """How a parameter is sharded: ``way`` in words, along ``dim``, chunk ``i`` on ``positions[i]``."""

    name: str
    way: str
    dim: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class PlanReport:
    """What each rank will hold, in bytes of parameters and buffers."""

    bytes_per_rank: tuple[int, ...]
    replicated_bytes: int
    choices: tuple[ShardingChoice, ...]

    @property
    def imbalance(self) -> float:
        """The fullest rank over the mean."""
        mean = sum(self.bytes_per_rank) / len(self.bytes_per_rank)
        return max(self.bytes_per_rank) / mean if mean else 1.0

    def __str__(self) -> str:
        lines = [f"{choice.name}: {choice.way}" for choice in self.choices]
        lines += [f"rank {rank}: {held:,} bytes" for rank, held in enumerate(self.bytes_per_rank)]
        return "\n".join([*lines, f"of these on every rank: {self.replicated_bytes:,} bytes"])


@dataclass
class AutoPlan(ShardingPlan):
    """A ``ShardingPlan`` with the report of what it will do."""

    report: PlanReport = field(default_factory=lambda: PlanReport((), 0, ()))


def auto_plan(module: nn.Module, mesh: DeviceMesh, memory_budget: int | None = None) -> AutoPlan:
    """Return a plan for ``shard_module`` that balances bytes over the ranks of ``mesh``.

    ``memory_budget``: bytes of parameters and buffers that a rank may hold. With a budget only as much is sharded as it
    takes, the largest first; without one everything that can be. Makes no collective and changes nothing.

    >>> plan = auto_plan(model, mesh, memory_budget=1 << 30)      # doctest: +SKIP
    >>> print(plan.report)                                        # doctest: +SKIP

    Raises:
        ValueError: even with everything sharded a rank would hold more than the budget.
    """
    candidates, total = find_candidates(module)
    ranks = mesh.mesh.flatten().tolist()
    choices, report = choose(candidates, total, len(ranks), memory_budget)
    devices = [_device(mesh.device_type, position) for position in range(len(ranks))]
    plan: dict[str, Any] = {
        choice.name: ChunkShardingSpec(choice.dim, [f"rank:{ranks[p]}/{devices[p]}" for p in choice.positions])
        for choice in choices
    }
    return AutoPlan(plan, report=report)


def _device(kind: str, position: int) -> str:
    return kind if is_host(kind) else f"{kind}:{position % max(1, of(kind).count())}"


def find_candidates(module: nn.Module) -> tuple[list[Candidate], int]:
    """Return what can be sharded, and the bytes of all parameters and buffers; what is shared counts once."""
    candidates: list[Candidate] = []
    seen: set[int] = set()
    total = 0
    for path, part in module.named_modules():
        kind = "embedding" if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) else "linear"
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if id(tensor) in seen:
                candidates = [c for c in candidates if c.name not in _names_of(module, tensor)]
                continue  # sharing survives sharding only if every place is in the plan: leave it whole
            seen.add(id(tensor))
            total += tensor.numel() * tensor.element_size()
            weight = name == "weight" and isinstance(part, (nn.Embedding, nn.EmbeddingBag, nn.Linear))
            if weight and tensor.dim() == 2:
                full = f"{path}.{name}" if path else name
                candidates.append(Candidate(full, kind, (tensor.shape[0], tensor.shape[1]), tensor.element_size()))
    return candidates, total


def _names_of(module: nn.Module, tensor: torch.Tensor) -> set[str]:
    return {name for name, other in module.named_parameters(remove_duplicate=False) if other is tensor}


def choose(
    candidates: Sequence[Candidate], total: int, num_ranks: int, budget: int | None
) -> tuple[tuple[ShardingChoice, ...], PlanReport]:
    """Return the decisions. Every rank starts with all bytes; sharding one takes it off the ranks without it."""
    fair = sum(candidate.nbytes for candidate in candidates) / num_ranks
    replicated, sharded = total, [0] * num_ranks
    choices = []
    for candidate in sorted(candidates, key=lambda c: (-c.nbytes, c.name)):
        if budget is not None and replicated + max(sharded) <= budget:
            break
        choice = _choose_one(candidate, fair, sharded)
        for position, held in zip(choice.positions, _held(candidate, choice), strict=True):
            sharded[position] += held
        replicated -= candidate.nbytes
        choices.append(choice)
    report = PlanReport(tuple(replicated + held for held in sharded), replicated, tuple(choices))
    if budget is not None and max(report.bytes_per_rank) > budget:
        raise ValueError(
            f"a rank would hold {max(report.bytes_per_rank):,} bytes with everything sharded over {num_ranks} ranks, "
            f"more than the budget of {budget:,}; {replicated:,} bytes cannot be sharded. "
            f"Use more ranks or a larger budget"
        )
    return tuple(choices), report


def _choose_one(candidate: Candidate, fair: float, sharded: Sequence[int]) -> ShardingChoice:
    num_ranks = len(sharded)
    emptiest = tuple(sorted(range(num_ranks), key=lambda position: (sharded[position], position)))
    if candidate.kind == "linear":
        dim = 0 if candidate.shape[0] >= candidate.shape[1] else 1
        way = "by columns (outputs)" if dim == 0 else "by rows (inputs)"
        return ShardingChoice(
            candidate.name, way, dim, tuple(range(num_ranks))
        )  # in order: converts to a DTensor for free
    if candidate.nbytes * 2 > fair and candidate.shape[0] >= num_ranks:
        return ShardingChoice(candidate.name, "by rows", 0, emptiest)  # the emptiest ranks get the fuller chunks
    return ShardingChoice(candidate.name, "whole table on one rank", 0, emptiest[:1])


def _held(candidate: Candidate, choice: ShardingChoice) -> list[int]:
    _, lengths = chunk_lengths(candidate.shape[choice.dim], len(choice.positions))
    return [length * candidate.shape[1 - choice.dim] * candidate.itemsize for length in lengths]
