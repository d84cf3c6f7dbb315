"""Inputs that a parallel style gathers: their gradients are reduce-scattered, and right whoever else uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from torch import Tensor, nn

from phalanx.tensor import Replicate, Shard, distribute_tensor
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.fast


class Heads(nn.Module):
    """Three layers use one gathered input; ``meddle`` does something with it besides."""

    def __init__(self, meddle: Callable[[Any, Any], Any] = lambda x, y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(6, 8, dtype=torch.float64) for _ in range(3))
        self.out = nn.Linear(8, 6, dtype=torch.float64)
        self.meddle = meddle

    def forward(self, x: Tensor) -> Any:
        y = self.q(x).tanh() * self.k(x).sigmoid() + self.v(x)
        return self.out(self.meddle(x, y))


def sharded(mesh: Any, module: nn.Module) -> nn.Module:
    columns = ColwiseParallel(use_local_output=False)
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    parallelize_module(module, mesh, {"q": columns, "k": columns, "v": columns, "out": rows})
    style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return parallelize_module(module, mesh, style)


def data() -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_as_plain(mesh: Any, use: Callable[[Any, Any], Any], meddle: Any = lambda x, y: y) -> dict[str, int]:
    expected, plain = data().requires_grad_(), Heads(meddle)
    use(plain, expected).backward()
    model, x = sharded(mesh, Heads(meddle)), distribute_tensor(data(), mesh, [Shard(1)]).requires_grad_()
    loss = use(model, x)
    with CommDebugMode() as seen:
        loss.backward()
    torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
    return {str(name): count for name, count in seen.get_comm_counts().items()}


def total(value: Any) -> Any:
    found = (value**2).sum()
    return found.redistribute(placements=[Replicate()]) if hasattr(found, "redistribute") else found


def test_three_layers_share_one_reduce_scatter() -> None:
    def body(mesh: Any) -> None:
        counts = assert_as_plain(mesh, lambda model, x: total(model(x)))
        assert counts == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}

    on_mesh(body, 2)


def test_other_uses_of_the_gathered_input_count_too() -> None:
    def beside(x: Any, y: Any) -> Any:
        return y + F.relu(x).sum()

    def one_by_one(x: Any, y: Any) -> Any:
        return y * (x[:, :1, :1] + 1)

    for meddle in (beside, one_by_one):
        on_mesh(lambda mesh, meddle=meddle: assert_as_plain(mesh, lambda model, x: total(model(x)), meddle) and None, 2)


def test_gradients_of_gradients() -> None:
    def penalty(model: Any, x: Any) -> Any:
        y = x * 2
        (gradient,) = torch.autograd.grad(total(model(y)), y, create_graph=True)
        return total(gradient)

    on_mesh(lambda mesh: assert_as_plain(mesh, penalty) and None, 2)


def test_whoever_asks_for_its_gradient_gets_it_or_is_refused() -> None:
    def before(x: Any, kept: list[Any]) -> None:
        x.retain_grad()
        kept.append(x)

    def body(mesh: Any) -> None:
        asks = (
            lambda x, loss: x.retain_grad(),
            lambda x, loss: x.register_hook(lambda g: g),
            lambda x, loss: torch.autograd.grad(loss, x),
            lambda x, loss: loss.backward(inputs=[x]),
        )
        for ask in asks:
            kept: list[Any] = []
            model = sharded(mesh, Heads(lambda x, y, kept=kept: kept.append(x) or y))
            loss = total(model(distribute_tensor(data(), mesh, [Shard(1)]).requires_grad_()))
            with pytest.raises(RuntimeError, match=r"rank \d: .* gathered for a module, after the module has used it"):
                ask(kept[0], loss)
        plain, expected = Heads(), data().requires_grad_()
        total(plain(expected)).backward()
        kept = []
        model = sharded(mesh, Heads())
        model.register_forward_pre_hook(lambda module, args: before(args[0], kept))
        total(model(distribute_tensor(data(), mesh, [Shard(1)]).requires_grad_())).backward()
        torch.testing.assert_close(kept[0].grad.full_tensor(), expected.grad)

    on_mesh(body, 2)


def test_a_write_to_what_backward_needs_is_an_error() -> None:
    def body(mesh: Any) -> None:
        model = sharded(mesh, Heads(lambda x, y: x.mul_(2) is not None and y))
        loss = total(model(distribute_tensor(data(), mesh, [Shard(1)]).requires_grad_()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_mesh(body, 2)
