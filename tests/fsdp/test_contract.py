"""Fully sharded units keep the contract of the textbook: gathers and reductions by unit, their bytes, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from phalanx.comm import DeviceMesh
from phalanx.fsdp import fully_shard
from phalanx.tensor.debug import ContractBreach, check_contract, contracts

WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
PADDING = 4 * 64 * 8
"""Bytes of headers and of rounding up to 64 elements, on each of the ranks."""


def builder(reshard: bool) -> Callable[[DeviceMesh], tuple[nn.Module, Callable[[], None]]]:
    def build(mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        x = torch.ones(2, WIDTH)

        def step() -> None:
            model(x).sum().backward()

        return model, step

    return build


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_units_are_gathered_and_reduced_as_often_as_the_textbook_says(num_ranks: int, reshard: bool) -> None:
    wanted = contracts.fully_shard(
        dict.fromkeys(("0", "1", "2"), LAYER), reshard_after_forward=reshard, padding=PADDING
    )
    check_contract(builder(reshard), wanted, mesh={"dp": num_ranks})


def test_another_number_of_gathers_is_a_breach() -> None:
    wanted = contracts.fully_shard(dict.fromkeys(("0", "1", "2"), LAYER), reshard_after_forward=False, padding=PADDING)
    with pytest.raises(ContractBreach, match="all_gather"):
        check_contract(builder(True), wanted, mesh={"dp": 2})
