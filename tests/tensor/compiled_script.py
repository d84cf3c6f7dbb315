"""What real workers compile, each beside its eager twin: ``phalanx run compiled_script.py DIR BACKEND [--gloo]``.

DIR gets ``done-RANK`` from each rank that has seen no difference: with ``aot_eager`` bits, else 1e-6.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from meshes import MLP, whole
from torch import Tensor, nn

import phalanx
from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.comm.transports import _auto
from phalanx.ddp import DistributedDataParallel
from phalanx.fsdp import fully_shard
from phalanx.tensor import manual_seed
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Dropping(MLP):
    def forward(self, x: Any) -> Any:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(8, 16) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x


def seeded(kind: Callable[..., nn.Module], *given: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*given)


def train(call: Callable[..., Any], model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Results and gradients of each pass, then weights; and what was sent."""
    found, sent = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comm.observe(lambda event: sent.append((event.name, event.nbytes))):
        for x in inputs:
            result = call(x)
            result.square().mean().backward()
            found.append(result.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    return found + [whole(p).clone() for p in model.parameters()], sent


def same(found: list[Tensor], expected: list[Tensor], backend: str) -> None:
    for one, other in zip(found, expected, strict=True):
        if backend == "aot_eager":
            assert torch.isfinite(one).all()
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * max(1.0, float(other.abs().max())))


def tensor_parallel(mesh: Any, backend: str) -> None:
    """Uneven shards, masks on DTensors; then rank 1 compiles anew, and then runs the program as it is."""
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    model = parallelize_module(seeded(Dropping, 6, 9), mesh, plan)
    inputs = [torch.linspace(-1, 1, 30).reshape(5, 6) * n for n in (1, 2)]
    start = copy.deepcopy(model.state_dict())

    def once(call: Callable[..., Any]) -> tuple[list[Tensor], list[Any]]:
        model.load_state_dict(start)
        manual_seed(7, mesh)
        return train(call, model, inputs)

    expected, sent = once(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for change in (lambda: None, torch._dynamo.reset, lambda: torch.compiler.set_stance("force_eager")):
        if mesh.get_rank() == 1:
            change()
        found, also_sent = once(compiled)
        same(found, expected, backend)
        assert also_sent == sent
    torch.compiler.set_stance("default")


def data_parallel(mesh: Any, backend: str) -> None:
    """``DDP(compile(m))`` and ``compile(DDP(m))``; the ranks see different data."""
    inputs = [torch.linspace(-1, 1, 16).reshape(2, 8) * (1 + n + mesh.get_rank()) for n in range(3)]
    eager = seeded(Layers)
    expected, _ = train(DistributedDataParallel(eager, bucket_cap_mb=1), eager, inputs)
    inside, around = seeded(Layers), seeded(Layers)
    calls = {
        inside: DistributedDataParallel(torch.compile(inside, backend=backend), bucket_cap_mb=1),
        around: torch.compile(DistributedDataParallel(around, bucket_cap_mb=1), backend=backend),
    }
    for model, call in calls.items():
        found, _ = train(call, model, inputs)
        same(found, expected, backend)


def fully_sharded(mesh: Any, backend: str) -> None:
    """Each layer compiled; gathers and reduce-scatters as in eager."""
    inputs = [torch.linspace(-1, 1, 16).reshape(2, 8) * (1 + n + mesh.get_rank()) for n in range(3)]
    results = []
    for is_compiled in (False, False, True):  # the first one finds out how its group sends
        model: Any = seeded(Layers)
        for layer in model.layers:
            if is_compiled:
                layer.compile(backend=backend)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        results.append(train(model, model, inputs))
    (expected, sent), (found, also_sent) = results[1:]
    same(found, expected, backend)
    assert also_sent == sent, f"{also_sent} in place of {sent}"


def main() -> None:
    directory, backend = Path(sys.argv[1]), sys.argv[2]
    if "--gloo" in sys.argv:
        _auto.choose = lambda identities: _auto.TransportChoice("gloo", "the test says so")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    group = phalanx.init()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for program in (tensor_parallel, data_parallel, fully_sharded):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        program(mesh, backend)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before, "something was compiled"
        torch._dynamo.reset()
    (directory / f"done-{group.rank}").write_text(group.backend)


if __name__ == "__main__":
    main()
