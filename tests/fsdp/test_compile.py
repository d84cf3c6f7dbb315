"""Sharded modules compiled layer by layer: gathers and reductions stay out of the graphs, bits are those of eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from fsdp.models import batch, build
from fsdp.ranks import on_ranks, shard
from phalanx import comm
from torch_settings import recompile_limit

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with recompile_limit(64):
        yield
    torch._dynamo.reset()


class Graphs:
    """A backend that takes graphs as they are, and keeps them and how often they were made."""

    def __init__(self) -> None:
        self.made = 0
        self.operations: set[str] = set()
        self.backend = aot_autograd(fw_compiler=self._take, bw_compiler=self._take)

    def _take(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.made += 1
        self.operations |= {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        return make_boxed_func(graph.forward)


def trained(model: Any, rank: int, size: int, counts: list[int]) -> tuple[list[Any], list[Any]]:
    """Three steps of SGD; whole weights, and what was sent in each step."""
    optimizer, sent = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        events: list[Any] = []
        with comm.observe(lambda event, events=events: events.append((event.name, event.nbytes))):
            model(batch(step).chunk(size)[rank]).pow(2).mean().backward()
        sent.append(events)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()], sent


def test_layers_compiled_one_by_one_train_as_eager_does() -> None:
    def body(mesh: Any) -> None:
        rank, size = mesh.get_rank(), mesh.size()
        eager, sent = trained(shard(build("transformer"), mesh), rank, size, [])
        model, graphs = shard(build("transformer"), mesh), Graphs()
        for block in model.blocks():
            block.compile(backend=graphs.backend)
        counts: list[int] = []
        compiled, also_sent = trained(model, rank, size, counts)
        for one, other in zip(compiled, eager, strict=True):
            assert torch.equal(one, other)
        assert also_sent == sent, "the same collectives, in the same order"
        assert graphs.made, "something was compiled"
        assert not [name for name in graphs.operations if "phalanx" in name or "c10d" in name], graphs.operations
        assert counts[1] == counts[2], "no graph is made anew when a unit is gathered again"

    on_ranks(body, 2)


def test_a_whole_model_compiled_is_cut_at_the_hooks() -> None:
    def body(mesh: Any) -> None:
        rank, size = mesh.get_rank(), mesh.size()
        eager, sent = trained(shard(build("transformer"), mesh), rank, size, [])
        model, graphs = shard(build("transformer"), mesh), Graphs()
        model.compile(backend=graphs.backend)
        compiled, also_sent = trained(model, rank, size, [])
        for one, other in zip(compiled, eager, strict=True):
            assert torch.equal(one, other)
        assert also_sent == sent
        assert graphs.made

    on_ranks(body, 2)


def test_a_unit_that_was_sharded_after_it_was_compiled() -> None:
    """``layer.compile()`` first, ``fully_shard`` then: the order that some training scripts have."""

    def body(mesh: Any) -> None:
        rank, size = mesh.get_rank(), mesh.size()
        eager, _ = trained(shard(build("transformer"), mesh), rank, size, [])
        model, graphs = build("transformer"), Graphs()
        for block in model.blocks():
            block.compile(backend=graphs.backend)
        compiled, _ = trained(shard(model, mesh), rank, size, [])
        for one, other in zip(compiled, eager, strict=True):
            assert torch.equal(one, other)
        assert graphs.made

    on_ranks(body, 2)
