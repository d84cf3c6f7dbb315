"""Sharding and gathering whole modules: as many collectives for a thousand parameters as for ten."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx import shard
from phalanx.comm import observe, simulate
from phalanx.shard import ShardingPlan, shard_module
from shard.layouts import chunk

METADATA = ("all_gather", "all_gather_into_tensor", "broadcast")


def counted(function):
    events = []
    with observe(lambda event: events.append(event.name)):
        function()
    return events


@pytest.mark.parametrize("count", [10, 1000])
def test_modules_of_any_size_are_sharded_and_gathered_in_as_many_collectives(count) -> None:
    def main(group):
        torch.manual_seed(group.rank)
        module = nn.ParameterDict({f"p{i}": nn.Parameter(torch.rand(4, 3)) for i in range(count)})
        whole = {name: p.detach().clone() for name, p in module.items()}
        plan = ShardingPlan({name: chunk(3, i % 2) for i, name in enumerate(module)})
        calls = counted(lambda: shard_module(module, plan))
        assert sum(name in METADATA for name in calls) == 2
        assert len(calls) == 3
        assert counted(lambda: shard_module(nn.ParameterDict(whole), ShardingPlan({"p1": chunk(3)}), verify=False)) == [
            "scatter"
        ]
        state = None

        def gather():
            nonlocal state
            state = shard.gather_state_dict(module.state_dict())

        assert counted(gather) == ["gather"]
        return state, whole

    (state, whole), (nothing, _), _ = simulate(3).run(main)
    assert nothing is None
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
