"""torch.compile around DTensors, with a backend that takes any graph: our modules run as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from phalanx import comm, shard
from phalanx.ddp import DistributedDataParallel
from phalanx.tensor import DTensor, Shard, communication_mode, distribute_tensor, init_device_mesh
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.timeout(280)


class Frames:
    """A backend that keeps which files it was given frames of."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            self.files += re.findall(r'File "([^"]+)"', node.meta.get("stack_trace") or "")
        return graph.forward

    @property
    def ours(self) -> list[str]:
        return [
            file
            for file in self.files
            if ("/phalanx/" in file and "/parallel/" not in file) or file.startswith("<runner")
        ]


@pytest.fixture
def mesh() -> Iterator[Any]:
    torch._dynamo.reset()
    with comm.use_group(comm.simulate(1).run(lambda group: group)[0]):
        yield init_device_mesh("cpu", (1,))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # optimizers make it import Inductor
def test_a_compiled_step_is_the_eager_one(mesh: Any) -> None:
    def steps(compiled: bool) -> tuple[list[float], Frames]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        frames = Frames()

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.sin(x) * 2).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(step, backend=frames) if compiled else step
        return [float(run(torch.ones(3, 4) * i)) for i in range(3)], frames

    eager, _ = steps(compiled=False)
    compiled, frames = steps(compiled=True)
    assert compiled == eager
    assert frames.files, "what the user wrote is compiled"
    assert not frames.ours


def test_what_changes_between_calls_is_seen(mesh: Any) -> None:
    x, factor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), [1.0]
    scaled = torch.compile(lambda t: (t * factor[0]).relu().sum(), backend=Frames())
    assert scaled(x).full_tensor() == 28
    factor[0] = 3.0
    assert scaled(x).full_tensor() == 84
    assert scaled(x + 1).full_tensor() == 108
    dropped = torch.compile(lambda t: nn.functional.dropout(t, 0.5), backend=Frames())
    many = distribute_tensor(torch.ones(100), mesh, [Shard(0)])
    assert not torch.equal(dropped(many).full_tensor(), dropped(many).full_tensor()), "no mask is frozen"
    inside = torch.compile(
        lambda t: DTensor.from_local(t * 2, mesh, [Shard(0)]).sum().full_tensor() + 1, backend=Frames()
    )
    assert inside(torch.ones(4)) == 9
    assert inside(torch.zeros(4)) == 1
    with communication_mode("explicit"):
        assert scaled(x).full_tensor() == 84


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_other_tensors_and_modules_of_ours(mesh: Any) -> None:
    frames = Frames()
    table = shard.ones(shard.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 4)
    assert torch.compile(lambda t: t * 2, backend=frames)(table).local_shards()[0].tensor.sum() == 32
    model = DistributedDataParallel(Scaled())
    torch.compile(model, backend=frames)(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((4,), 2.0))
    assert not frames.ours
    assert __file__ in frames.files, "the wrapped module is compiled"
