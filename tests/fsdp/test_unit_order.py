"""Ranks of real processes that run units in different orders, of different sizes: all hear which ranks and units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp.ranks import shard
from fsdp.test_communication import GATHER, REDUCE, SUM, counts, one_step
from phalanx.comm import DeviceMesh, init_device_mesh, use_group
from phalanx.errors import CollectiveMismatch
from processes import Worker, run_processes

pytestmark = pytest.mark.timeout(300)


class Branches(nn.Module):
    """A first layer and two of other sizes behind it; gloo ends a process that gets more bytes than it expects."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.small, self.large = nn.Linear(8, 8), nn.Linear(8, width), nn.Linear(8, 2 * width)

    def forward(self, x: Tensor, way: Callable[[Branches, Tensor], Tensor]) -> Tensor:
        return way(self, self.first(x))

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.small, self.large]


def together(model: Branches, x: Tensor) -> Tensor:
    return model.small(x).sum() + model.large(x).sum()


def alone(model: Branches, x: Tensor) -> Tensor:
    return x.sum()


def small(model: Branches, x: Tensor) -> Tensor:
    return model.small(x).sum()


def large(model: Branches, x: Tensor) -> Tensor:
    return model.large(x).sum()


def keep_whole(model: Branches) -> None:
    for block in model.children():
        block.set_reshard_after_forward(False)


def gathers(model: Branches, x: Tensor, odd: bool) -> None:
    model(x, large if odd else small)


def skips(model: Branches, x: Tensor, odd: bool) -> None:
    model(x, large if odd else together)


def reduces_or_gathers(model: Branches, x: Tensor, odd: bool) -> None:
    keep_whole(model)
    y = model(x, small)
    if odd:
        model.large(x)
    else:
        y.backward()


def reduces(model: Branches, x: Tensor, odd: bool) -> None:
    keep_whole(model)
    model(x, together)
    (model.large if odd else model.small)(x.detach().requires_grad_()).sum().backward()


def trains_other_parameters(model: Branches, x: Tensor, odd: bool) -> None:
    model.large.weight.requires_grad_(odd)
    model(x, large).backward()


Case = Callable[[Branches, Tensor, bool], None]
NAMES = {
    gathers: ("gathers unit 'small'", "gathers unit 'large'"),
    skips: ("gathers unit 'small'", "gathers unit 'large'"),
    reduces_or_gathers: ("reduces unit 'small'", "gathers unit 'large'"),
    reduces: ("reduces unit 'small'", "reduces unit 'large'"),
    trains_other_parameters: ("reduces unit 'large' with", "reduces unit 'large' with"),
}


def heard(mesh: DeviceMesh, case: Case, width: int, odd: bool) -> str:
    """Return what a rank hears of the others."""
    torch.manual_seed(0)
    model = shard(Branches(width), mesh)
    x = torch.randn(4, 8)
    model(x, alone).backward()  # so that no rank gathers anything ahead, which would come in one order on all of them
    try:
        case(model, x, odd)
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def _both(worker: Worker, backend: str) -> dict[str, str]:
    found = {}
    for generation, (case, width) in enumerate((case, width) for width in (24, 1024) for case in NAMES):
        with worker.group(backend=backend, generation=generation) as group, use_group(group):
            mesh = init_device_mesh("cpu", (worker.size,))
            found[f"{case.__name__} {width}"] = heard(mesh, case, width, worker.rank == 1)
    return found


@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_two_ranks_in_different_orders_hear_of_it(backend: str) -> None:
    """Nobody is ended by its transport, and nobody waits for the group's timeout, which would be another error."""
    outcomes = run_processes(2, _both, backend, timeout=250.0)
    for case in NAMES:
        for width in (24, 1024):
            for rank, outcome in enumerate(outcomes):
                text = outcome.value[f"{case.__name__} {width}"]
                where = (backend, case.__name__, width, rank, text)
                assert f"rank {rank} " in text, where
                assert f"rank {1 - rank} " in text, where
                if backend == "gloo":
                    assert f"rank {rank} {NAMES[case][rank]}" in text, where
                    assert case is trains_other_parameters or f"rank {1 - rank} {NAMES[case][1 - rank]}" in text, where
                else:  # where sizes are compared by the transport, it tells what was called, and for which unit here
                    assert "unit '" in text, where


def _replicas(worker: Worker, backend: str) -> tuple[str, dict[str, int]]:
    with worker.group(backend=backend) as group, use_group(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sums = counts(mesh, one_step)
        return heard(mesh, gathers_by_replica, 24, worker.rank >= 2), sums


def gathers_by_replica(model: Branches, x: Tensor, odd: bool) -> None:
    """The ranks of a replica agree with each other; only the sum of the replicas' gradients shows it."""
    model(x, large if odd else small).backward()


@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_replicas_in_different_orders_hear_of_it(backend: str) -> None:
    """And what ranks tell each other of their order is not counted as communication of the model's."""
    for rank, outcome in enumerate(run_processes(4, _replicas, backend, timeout=250.0)):
        text, sums = outcome.value
        assert "unit 'large'" in text if rank >= 2 else "unit 'small'" in text, text
        if backend == "gloo":
            assert "adds the replicas' sums of unit 'small' where rank" in text or (
                "adds the replicas' sums of unit 'large' where rank" in text
            )
            assert sums == {GATHER: 9, REDUCE: 5, SUM: 5}
