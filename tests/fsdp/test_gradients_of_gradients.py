"""Penalties on gradients: their graph computes with whole parameters after the hooks of every module have run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp.models import batch
from fsdp.ranks import on_ranks
from phalanx.fsdp import FSDPModule, fully_shard


class Critic(nn.Module):
    """Scores of samples; every unit matters to the second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1, bias=False)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(F.softplus(self.first(x))))


def critic(mesh: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Critic()
    if mesh is not None:
        for layer in (model.first, model.middle, model.last, model):
            fully_shard(layer, mesh=mesh, **options)
    return model


def between_other_losses(model: Any, x: Tensor) -> Tensor:
    before = model(x * 2).mean()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return before + (slope.norm(dim=1) - 1).pow(2).mean() + model(x * 3).mean()


def of_a_penalty(model: Any, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.pow(2).sum(), x, create_graph=True)
    return bend.pow(2).mean()


def without_the_outputs(model: Any, x: Tensor) -> Tensor:
    """The slope of a linear layer: its gradient reaches the weight, and no output of any module."""
    (slope,) = torch.autograd.grad(model.last(x.repeat(1, 2)[:, :8]).sum(), x, create_graph=True)
    return slope.pow(2).mean()


def units_of(model: Any) -> list[Any]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [state.unit for state in states if state.unit is not None]


def assert_same_gradients(model: Any, expected: Any) -> None:
    for (name, parameter), one in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (one.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("penalty", [between_other_losses, of_a_penalty, without_the_outputs])
def test_penalties_train_as_on_one_device(penalty, keep):
    def body(mesh):
        model, expected = critic(mesh, reshard_after_forward=not keep), critic()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, expected)]
        for step in range(3):
            for one in (model, expected):
                penalty(one, batch(step).requires_grad_()).backward()
            assert_same_gradients(model, expected)
            assert {unit.state.value for unit in units_of(model)} == {"sharded"}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    on_ranks(body, 2)


def test_a_graph_of_a_shards_gradient_is_refused():
    def body(mesh):
        model, expected = critic(mesh), critic()
        with pytest.raises(RuntimeError, match=r"create_graph=True\) accumulates the gradient of 'weight' in unit"):
            model(batch(0)).pow(2).mean().backward(create_graph=True)
        model.reset_iter_state()
        model.zero_grad()
        for one in (model, expected):
            one(batch(0)).pow(2).mean().backward()
        assert_same_gradients(model, expected)

    on_ranks(body, 2)
