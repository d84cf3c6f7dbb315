"""The walk through one DDP step, as ARCHITECTURE.md tells it: which files run, and how often a reader changes files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.comm import Group, simulate
from phalanx.ddp import DistributedDataParallel
from walks import Walk, recorded

STEPS_UNTIL_SETTLED = 6  # buckets are assigned anew after the first and the third


def walk_of_one_backward(group: Group) -> Walk:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    for _ in range(STEPS_UNTIL_SETTLED):
        model.zero_grad()
        loss = model(torch.ones(4, 8)).sum()
        with recorded() as walk:
            loss.backward()
    return walk


@pytest.mark.fast
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_backward_changes_files_at_most_27_times(world_size: int) -> None:
    """On the rank that comes last and need not wait: how simulated ranks take turns is no part of a backward."""
    walk = simulate(world_size).run(walk_of_one_backward)[-1]
    assert walk.switches <= 27, "\n".join(walk.files)


@pytest.mark.fast
def test_the_files_of_one_backward_are_those_of_the_tour() -> None:
    """The reducer, what it calls, and one collective: a new file belongs into the tour."""
    walk = simulate(2).run(walk_of_one_backward)[-1]
    assert sorted({file for file in walk.files if file.startswith("ddp/")}) == [
        "ddp/buckets/_flat_buffer.py",
        "ddp/reducer/_arrivals.py",
        "ddp/reducer/_bucket_exchange.py",
        "ddp/reducer/_pass.py",
        "ddp/reducer/_reducer.py",
        "ddp/reducer/_stats.py",
    ]
    assert walk.files[0] == "ddp/reducer/_reducer.py"
    assert "comm/group/_group_collectives.py" in walk.files
