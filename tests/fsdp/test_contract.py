"""Fully sharded units keep the contract of the textbook: gathers and reductions by unit, their bytes, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm import DeviceMesh
from phalanx.fsdp import fully_shard
from phalanx.tensor.debug import ContractBreach, check_contract, contracts
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
PADDING = 4 * 64 * 8
"""Bytes of headers and of rounding up to 64 elements, on each of the ranks."""


def builder(reshard: bool | int) -> Callable[[DeviceMesh], tuple[nn.Module, Callable[[], None]]]:
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


def test_a_block_of_ranks_gathers_as_much_as_all_would() -> None:
    wanted = contracts.fully_shard(dict.fromkeys(("0", "1", "2"), LAYER), reshard_after_forward=2, padding=PADDING)
    check_contract(builder(2), wanted, mesh={"dp": 4})


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_replicas_add_up_their_parts_of_a_gradient(shape: tuple[int, int]) -> None:
    units = dict.fromkeys(("0", "1", "2"), LAYER)
    mesh = dict(zip(("replicate", "shard"), shape, strict=True))
    wanted = contracts.fully_shard(units, shard_ranks=shape[1], padding=PADDING)
    check_contract(builder(True), wanted, mesh=mesh)
    with pytest.raises(ContractBreach, match="no all_reduce in backward"):
        check_contract(builder(True), contracts.fully_shard(units, padding=PADDING), mesh=mesh)
    whole = contracts.fully_shard(units, shard_ranks=1, padding=PADDING)
    with pytest.raises(ContractBreach, match="all_reduce"):
        check_contract(builder(True), whole, mesh=mesh)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize(
    "mesh", [{"shard": 2, "tp": 2}, {"replicate": 2, "shard": 2, "tp": 2}], ids=["2-d", "3-d, hybrid"]
)
@pytest.mark.parametrize("num_rows", [2, 3])
def test_tensor_parallel_units_keep_both_contracts(mesh: dict[str, int], num_rows: int) -> None:
    """A rank gathers its shards of the weights only, and the activations' sums are those of tensor parallel alone."""

    def build(mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Sequential(Pair(), Pair())
        data = mesh["shard"] if mesh.ndim == 2 else mesh["replicate", "shard"]
        for pair in model:
            parallelize_module(pair, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(pair, mesh=data)
        fully_shard(model, mesh=data)
        x = torch.ones(num_rows, WIDTH, requires_grad=True)
        return model, lambda: model(x).sum().backward()

    of_a_rank = 4 * 2 * 2 * WIDTH * WIDTH // 2
    wanted = contracts.fully_shard(
        {"*": of_a_rank}, shard_ranks=2 if "replicate" in mesh else None, padding=PADDING
    ) + contracts.column_row_pair("*", nbytes=4 * num_rows * WIDTH)
    check_contract(build, wanted, mesh=mesh, steps=2)


def test_another_number_of_gathers_is_a_breach() -> None:
    wanted = contracts.fully_shard(dict.fromkeys(("0", "1", "2"), LAYER), reshard_after_forward=False, padding=PADDING)
    with pytest.raises(ContractBreach, match="all_gather"):
        check_contract(builder(True), wanted, mesh={"dp": 2})
