"""The planner: balance, budgets, and that its plans run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx import shard
from phalanx.comm import init_device_mesh, simulate
from phalanx.shard.plan._auto_plan import Candidate, choose

pytestmark = pytest.mark.fast


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(1000, 16)
        self.items = nn.EmbeddingBag(500, 16)
        self.cities = nn.Embedding(30, 8)
        self.days = nn.Embedding(31, 8)
        self.wide = nn.Linear(16, 64)
        self.tall = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)


def held_bytes(module: nn.Module) -> int:
    total = 0
    for tensor in [*module.parameters(), *module.buffers()]:
        parts = [s.tensor for s in tensor.local_shards()] if isinstance(tensor, shard.ShardedTensor) else [tensor]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def test_the_report_is_what_the_ranks_hold() -> None:
    def main(group):
        module = Tables()
        plan = shard.auto_plan(module, init_device_mesh("cpu", (3,)))
        shard.shard_module(module, plan)
        assert held_bytes(module) == plan.report.bytes_per_rank[group.rank]
        assert {name for name, p in module.named_parameters() if isinstance(p, shard.ShardedTensor)} == set(plan.plan)
        return plan.report, {choice.name: choice.way for choice in plan.report.choices}

    (report, ways), *others = simulate(3).run(main)
    assert all(other[0] == report for other in others)
    assert ways == {
        "users.weight": "by rows",
        "items.weight": "by rows",
        "cities.weight": "whole table on one rank",
        "days.weight": "whole table on one rank",
        "wide.weight": "by columns (outputs)",
        "tall.weight": "by rows (inputs)",
    }
    assert report.imbalance < 1.05
    assert "rank 2:" in str(report)
    assert "users.weight: by rows" in str(report)


def test_a_budget_shards_only_what_it_takes() -> None:
    def main(group):
        module, mesh = Tables(), init_device_mesh("cpu", (2,))
        total = held_bytes(module)
        assert shard.auto_plan(module, mesh, total).plan == {}
        some = shard.auto_plan(module, mesh, total - 1)
        assert list(some.plan) == ["users.weight"]
        assert max(some.report.bytes_per_rank) <= total - 1
        with pytest.raises(ValueError, match="more than the budget of 1,000"):
            shard.auto_plan(module, mesh, 1000)

    simulate(2).run(main)


def test_shared_parameters_stay_whole() -> None:
    def main(group):
        module = Tables()
        module.days.weight = module.cities.weight
        return sorted(shard.auto_plan(module, init_device_mesh("cpu", (2,))).plan)

    assert simulate(2).run(main)[0] == ["items.weight", "tall.weight", "users.weight", "wide.weight"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 64)), min_size=1, max_size=12), st.integers(1, 6))
def test_tables_are_balanced(shapes, num_ranks) -> None:
    candidates = [Candidate(f"t{i}", "embedding", shape, 4) for i, shape in enumerate(shapes)]
    total = sum(candidate.nbytes for candidate in candidates)
    choices, report = choose(candidates, total, num_ranks, None)
    assert sum(report.bytes_per_rank) == total
    assert len(choices) == len(candidates)
    # Greedy, largest first: no rank is further above the mean than what one decision can add.
    slack = max(
        [c.nbytes for c in candidates if c.nbytes * 2 * num_ranks <= total or c.shape[0] < num_ranks]
        + [c.shape[1] * 4 * -(-c.shape[0] // num_ranks) for c in candidates]
    )
    assert max(report.bytes_per_rank) <= total / num_ranks + slack


def test_table_wise_lookups_work_on_ranks_without_the_table() -> None:
    def main(group):
        torch.manual_seed(0)
        module = Tables()
        whole = module.cities.weight.detach().clone()
        shard.shard_module(module, shard.auto_plan(module, init_device_mesh("cpu", (3,))))
        ids = torch.tensor([group.rank, 29])
        out = module.cities(ids)
        out.sum().backward()
        assert torch.equal(out, whole[ids])
        parts = module.cities.weight.local_shards()
        return [part.tensor.grad.sum(1).nonzero().flatten().tolist() for part in parts]

    assert sorted(simulate(3).run(main)) == [[], [], [[0, 1, 2, 29]]]
