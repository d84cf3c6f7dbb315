"""Compiled models under DDP: the gradients of eager, and buckets that leave before the last graph of backward ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from phalanx import comm
from phalanx.ddp import DistributedDataParallel
from phalanx.tensor import init_device_mesh
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_settings import recompile_limit

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]
WIDTH = 512  # a layer's weight is 1 MiB: the least at which a graph is cut
WAYS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "compiled inside": lambda model, backend: DistributedDataParallel(
        torch.compile(model, backend=backend), bucket_cap_mb=1
    ),
    "compiled around": lambda model, backend: torch.compile(
        DistributedDataParallel(model, bucket_cap_mb=1), backend=backend
    ),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with recompile_limit(64):
        yield
    torch._dynamo.reset()


class Layers(nn.Module):
    """Not a Sequential, whose frames Dynamo leaves alone when it meets them first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def watched_backend(seen: list[str]) -> Any:
    """Take graphs as they are; ``seen`` gets a word when a graph of backward has run."""

    def backward(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            results = graph.forward(*args)
            seen.append("graph")
            return results

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)


def steps(model: nn.Module, group: Any, seen: list[str]) -> list[torch.Tensor]:
    """Three passes (the first one learns the order); the gradients of the last, and what happened in it."""
    for step in range(3):
        seen.clear()
        model.zero_grad()
        x = torch.full((2, WIDTH), 0.1 * (group.rank + 1 + step))
        result = model(x).square().sum()
        with comm.observe(lambda event: seen.append(event.name)):
            result.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_buckets_leave_before_the_last_graph_of_backward(way: str) -> None:
    def main(group: Any) -> None:
        seen: list[str] = []
        eager = steps(DistributedDataParallel(layers(), bucket_cap_mb=1), group, [])
        compiled = steps(WAYS[way](layers(), watched_backend(seen)), group, seen)
        for one, other in zip(compiled, eager, strict=True):
            assert torch.equal(one, other)
        assert seen.count("graph") == 4, seen
        assert seen[: seen.index("all_reduce")] == ["graph"], "the first bucket leaves after a quarter of backward"
        last = len(seen) - seen[::-1].index("graph") - 1
        assert seen[:last].count("all_reduce") == 3, seen

    comm.simulate(2, timeout=250.0).run(main)


def test_caps_below_a_mebibyte_and_parameters_that_are_dtensors() -> None:
    """The one cannot be told to torch, the other torch cannot cut: both are compiled all the same."""

    def main(group: Any) -> None:
        x = torch.ones(2, 8)
        small = DistributedDataParallel(torch.compile(nn.Linear(8, 8), backend="aot_eager"), bucket_cap_mb=0.1)
        small(x).sum().backward()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        alone = comm.simulate(1).run(lambda group: group)[0]
        results = []
        for inner in (model, torch.compile(model, backend="aot_eager")):
            wrapped = DistributedDataParallel(inner, process_group=alone)
            model.zero_grad()
            wrapped(x).sum().backward()
            results.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)

    comm.simulate(2, timeout=250.0).run(main)


def test_torchs_class_is_told_of_ours_only_inside_of_a_forward() -> None:
    from torch.nn.parallel import DistributedDataParallel as Theirs

    told: list[Any] = []

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told.append(Theirs._get_active_ddp_module())
            return super().forward(x)

    def main(group: Any) -> None:
        DistributedDataParallel(Asking(2, 2), bucket_cap_mb=3)(torch.ones(1, 2))
        Asking(2, 2)(torch.ones(1, 2))

    comm.simulate(1).run(main)
    assert told[0].bucket_bytes_cap == 3 * 2**20
    assert told[1] is None
