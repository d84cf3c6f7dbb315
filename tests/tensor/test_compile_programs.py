"""torch.compile on DTensor programs: one graph, the bits of eager, the same collectives in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from meshes import MLP, Block, on_mesh, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import comm
from phalanx.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_settings import recompile_limit

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]
ATTENTION = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
BLOCK_PLAN = {
    **ATTENTION,
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with recompile_limit(64):
        yield
    torch._dynamo.reset()


def values(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.linspace(-1, 1, count) + torch.arange(count) % 3).reshape(shape)


def spread(mesh: Any, tensor: Tensor, *placements: Any, grad: bool = True) -> Any:
    return distribute_tensor(tensor, mesh, list(placements)).requires_grad_(grad)


def run(function: Callable[..., Any], inputs: list[Any], parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    """Results, gradients, and what was sent on the way, of one forward and backward."""
    sent: list[Any] = []
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    for parameter in parameters:
        parameter.grad = None
    with comm.observe(lambda event: sent.append((event.name, event.nbytes))):
        result = function(*given)
        loss = result.square().sum()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    leaves = [t for t in (*given, *parameters) if t.requires_grad]
    return [whole(result), *(whole(t.grad) for t in leaves)], sent


def check(
    function: Callable[..., Any], inputs: list[Any], parameters: list[Any] | None = None, fullgraph: bool = True
) -> list[Any]:
    """``function`` compiled gives the bits and the collectives of eager, twice; returns what it sent."""
    held = parameters or []
    expected, sent = run(function, inputs, held)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        found, also_sent = run(compiled, inputs, held)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert also_sent == sent
    return sent


def check_model(model: nn.Module, mesh: Any, plan: Any, *shape: int) -> list[Any]:
    parallelize_module(model, mesh, plan)
    return check(model, [values(*shape).requires_grad_()], list(model.parameters()))


def test_tensor_parallel_models_are_one_graph() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        assert len(check_model(MLP(6, 10), mesh, PLAN, 3, 6)) == 2, "one sum forward, one backward"
        check_model(MLP(6, 9), mesh, PLAN, 3, 6)  # uneven
        check_model(MLP(6, 1), mesh, PLAN, 3, 6)  # the second rank holds nothing
        check_model(Block(8, 2), mesh, BLOCK_PLAN, 3, 4, 8)

    on_mesh(body, 2, timeout=500.0)


def test_layers_compiled_one_by_one() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(parallelize_module(MLP(6, 10), mesh, PLAN) for _ in range(2)))
        inputs, held = [values(3, 6).requires_grad_()], list(model.parameters())
        expected, sent = run(model, inputs, held)
        for layer in model:
            layer.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            found, also_sent = run(model, inputs, held)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
            assert also_sent == sent

    on_mesh(body, 2, timeout=500.0)


def test_moves_inside() -> None:
    def body(mesh: Any) -> None:
        def there_and_back(x: Any) -> Any:
            full = x.redistribute(placements=[Replicate()], async_op=True)
            return (full * 2).redistribute(placements=[Shard(1)]).sin()

        x = spread(mesh, values(5, 4), Shard(0))
        assert len(check(there_and_back, [x])) == 3
        check(lambda x: x.full_tensor().cos(), [x])
        even = spread(mesh, values(6, 4), Shard(0))
        again = lambda x: DTensor.from_local(x.to_local() * 2, mesh, [Shard(0)], shape=(6, 4)).sum(0)  # noqa: E731
        check(again, [even])
        check(lambda x: torch.softmax(x, -1), [spread(mesh, values(6, 4), Shard(1))])
        check(lambda x: x * (mesh.size() + 1) if x.placements[0].is_shard(0) else x, [even])
        with pytest.raises(Exception, match="pass shape=, the global one"):
            torch.compile(lambda x: DTensor.from_local(x, mesh, [Shard(0)]) * 2, backend="aot_eager", fullgraph=True)(
                torch.ones(3)
            )
        check(lambda x: DTensor.from_local(x.to_local(), mesh, [Shard(0)]) * 2, [x], fullgraph=False)

    on_mesh(body, 2, timeout=500.0)


def test_two_axes_and_a_slice() -> None:
    def body(mesh: Any) -> None:
        mesh.get_all_groups()
        x, w = spread(mesh, values(5, 6), Shard(0), Replicate()), spread(mesh, values(6, 4), Replicate(), Shard(1))
        check(lambda x, w: (x @ w).relu().sum(0), [x, w])
        torch.manual_seed(0)
        check_model(MLP(6, 10), mesh["tp"], PLAN, 3, 6)

    on_mesh(body, 2, 2, timeout=500.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x))) * self.scale


def test_what_models_do_besides() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        tied = distribute_module(Tied(), mesh)
        check(tied, [spread(mesh, values(3, 6), Shard(0))], list(tied.parameters()))
        mlp = parallelize_module(MLP(6, 10), mesh, PLAN)
        held = list(mlp.parameters())
        check(lambda x: checkpoint(mlp, x, use_reentrant=False) * 2, [values(3, 6).requires_grad_()], held)
        matrices = [spread(mesh, values(4, 6), Replicate()), spread(mesh, values(6, 4), Shard(1))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check(lambda x, w: x @ w, matrices)
        with torch.inference_mode():
            x = spread(mesh, values(4, 6), Shard(0), grad=False)
            summed = torch.compile(lambda x: (x.sum(0) * 2).relu(), backend="aot_eager", fullgraph=True)
            assert torch.equal(whole(summed(x)), whole((x.sum(0) * 2).relu()))

    on_mesh(body, 2, timeout=500.0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x)).relu()


def test_buffers_are_written() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        model = distribute_module(Normed(), mesh)
        other = copy.deepcopy(model)
        compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
        x = spread(mesh, values(4, 6), Shard(0))
        for _ in range(2):
            expected, sent = run(model, [x], list(model.parameters()))
            found, also_sent = run(compiled, [x], list(other.parameters()))
            assert also_sent == sent
            for one, two in zip(found, expected, strict=True):
                assert torch.equal(one, two)
        for (name, one), (_, two) in zip(model.named_buffers(), other.named_buffers(), strict=True):
            assert torch.equal(whole(one), whole(two)), name

    on_mesh(body, 2, timeout=500.0)


def test_indices_out_of_range_are_seen_in_the_graph() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        layer = parallelize_module(nn.Embedding(10, 4), mesh, RowwiseParallel(input_layouts=Replicate()))
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(torch.tensor([1, 9, 3])), layer(torch.tensor([1, 9, 3])))
        with pytest.raises(RuntimeError, match="index out of range"):
            compiled(torch.tensor([1, 20, 3]))

    on_mesh(body, 2, timeout=500.0)


def test_a_rank_that_compiles_anew_meets_one_that_has_its_graph() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        model, made = parallelize_module(MLP(6, 10), mesh, PLAN), []
        held, inputs = list(model.parameters()), [values(3, 6).requires_grad_()]
        plain = torch._dynamo.lookup_backend("aot_eager")

        def compiled() -> Any:
            def backend(graph: Any, given: Any) -> Any:  # one of its own: Dynamo shares graphs of the same
                made.append(mesh.get_rank())
                return plain(graph, given)

            return torch.compile(model, backend=backend, fullgraph=True)

        expected, sent = run(model, inputs, held)
        mine = compiled()
        run(mine, inputs, held)
        if mesh.get_rank() == 1:
            mine = compiled()
        found, also_sent = run(mine, inputs, held)
        assert len(made) == mesh.get_rank() + 1
        assert also_sent == sent
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    on_mesh(body, 2, timeout=500.0)
