"""What training scripts do around the model: initialise it, tie weights, checkpoint blocks in blocks, move optimizer
state between layouts. Against one device, or against another layout.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from meshes import MLP, assert_same, gradients, on_mesh, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

pytestmark = pytest.mark.fast


def rows(module: nn.Module, mesh: Any) -> nn.Module:
    """``module`` with every parameter cut by rows."""

    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        for key, p in list(part._parameters.items()):
            if p is not None:
                placed = distribute_tensor(p.detach(), mesh, [Shard(0) if p.dim() else Replicate()])
                part.register_parameter(key, nn.Parameter(placed))

    return distribute_module(copy.deepcopy(module), mesh, partition)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_keep_state_of_another_layout(name: str) -> None:
    """A 0-d parameter comes first: lists of state are told from lists of step counts by more than their first."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in ((), (5, 3), (4,))]
    options = {"lr": 0.1, "fused": True, **({"momentum": 0.9} if name == "SGD" else {})}

    def train(parameters: list[Any], between: Any) -> list[Any]:
        optimizer = getattr(torch.optim, name)(parameters, **options)
        for step in range(4):
            for p in parameters:
                p.grad = (p.detach() + step) * 0.5
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(between(optimizer.state_dict()))
        return [whole(p) for p in parameters]

    expected = train([nn.Parameter(v.clone()) for v in values], lambda state: state)

    def whole_state(state: Any) -> Any:
        for entry in state["state"].values():
            for key, value in entry.items():
                if isinstance(value, DTensor):
                    entry[key] = value.redistribute(placements=[Replicate()])
        return state

    def body(mesh: Any) -> None:
        layouts = [[Replicate()], [Shard(0)], [Shard(0)]]
        mine = [nn.Parameter(distribute_tensor(v, mesh, p)) for v, p in zip(values, layouts, strict=True)]
        for found, reference in zip(train(mine, whole_state), expected, strict=True):
            torch.testing.assert_close(found, reference)

    on_mesh(body, 3)


def test_optimizers_take_a_tensor_as_step_size() -> None:
    value = torch.arange(5.0)

    def train(parameter: Any) -> Any:
        parameter.grad = parameter.detach() - 2
        torch.optim.Rprop([parameter], lr=torch.tensor(0.1)).step()
        return whole(parameter)

    expected = train(nn.Parameter(value.clone()))

    def body(mesh: Any) -> None:
        found = train(nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))
        torch.testing.assert_close(found, expected)
        filled = torch.full_like(distribute_tensor(value, mesh, [Shard(0)]), torch.tensor(2.0))
        assert filled.placements == (Shard(0),)
        assert filled.full_tensor().tolist() == [2.0] * 5

    on_mesh(body, 2)


INITS: dict[str, Any] = {
    "uniform_": lambda p: nn.init.uniform_(p, 2.0, 3.0),
    "normal_": lambda p: nn.init.normal_(p, 5.0, 0.1),
    "constant_": lambda p: nn.init.constant_(p, 0.5),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=math.sqrt(5)),
    "eye_": nn.init.eye_,
}


@pytest.mark.parametrize("name", list(INITS))
def test_parameters_are_initialised_alike_under_every_layout(name: str) -> None:
    def body(mesh: Any, placement: Any) -> Any:
        torch.manual_seed(3)
        parameter = nn.Parameter(distribute_tensor(torch.full((5, 6), 9.0), mesh, [placement]))
        assert INITS[name](parameter) is parameter
        assert parameter.is_leaf
        return whole(parameter)

    (expected,) = on_mesh(lambda mesh: body(mesh, Replicate()), 1)
    assert 9.0 not in expected
    low, high = {
        "uniform_": (2, 3), "normal_": (4, 6), "constant_": (0.5, 0.5), "eye_": (0, 1),
        "kaiming_uniform_": (-(6**-0.5), 6**-0.5),
    }[name]  # fmt: skip
    assert low <= expected.min() <= expected.max() <= high
    for placement in (Shard(0), Shard(1)):
        for found in on_mesh(lambda mesh, p=placement: body(mesh, p), 3):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("inside", [nn.Tanh, lambda: MLP(4, 6)], ids=["no parameters", "parameters"])
def test_checkpoints_in_checkpoints(inside: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(inside(), inside(), inside()), torch.randn(5, 4)

    def run(net: nn.Module, data: Any) -> dict[str, Any]:
        data = data.detach().requires_grad_()

        def block(part: nn.Module, t: Any) -> Any:
            return checkpoint(part, t, use_reentrant=False)

        out = block(lambda t: block(net[2], block(net[:2], t * 2)), data)  # type: ignore[arg-type,index]
        out.square().sum().backward()
        return {"input": whole(data.grad), **gradients(net)}

    expected = run(copy.deepcopy(model), x)

    def body(mesh: Any) -> None:
        assert_same(run(rows(model, mesh), distribute_tensor(x, mesh, [Shard(0)])), expected)

    on_mesh(body, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embed(tokens))


def test_shared_parameters_stay_shared() -> None:
    def body(mesh: Any) -> None:
        replicated = distribute_module(Tied(), mesh)
        assert replicated.head.weight is replicated.embed.weight
        cut = rows(Tied(), mesh)
        assert cut.head.weight is cut.embed.weight
        assert cut.head.weight.placements == (Shard(0),)
        plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
        parallel = parallelize_module(Tied(), mesh, plan)
        assert parallel.head.weight is parallel.embed.weight
        with pytest.warns(UserWarning, match=r"shared one parameter.*embed.weight: .*head.weight: None"):
            parallelize_module(Tied(), mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})

    on_mesh(body, 1)


MIXED = [
    *((name, "foreach") for name in ("SGD", "Adam", "Adagrad", "RMSprop", "Adadelta", "NAdam")),
    *((name, "fused") for name in ("SGD", "Adam", "Adagrad")),
]


@pytest.mark.parametrize(("name", "variant"), MIXED)
def test_optimizers_take_plain_parameters_beside_distributed_ones(name: str, variant: str) -> None:
    """As in a model of which only some modules are parallel."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(4, generator=generator) for _ in range(4)]

    def train(parameters: list[Any]) -> list[Any]:
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=0.1, **{variant: True})
        for _ in range(3):
            for p in parameters:
                p.grad = p.detach() * 3
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=variant == "foreach")
            optimizer.step()
        return [whole(p) for p in parameters]

    expected = train([nn.Parameter(v.clone()) for v in values])

    def body(mesh: Any) -> None:
        mine: list[Any] = [nn.Parameter(v.clone()) for v in values]
        for i in (1, 3):
            mine[i] = nn.Parameter(distribute_tensor(values[i], mesh, [Shard(0)]))
        for found, reference in zip(train(mine), expected, strict=True):
            torch.testing.assert_close(found, reference)

    on_mesh(body, 2)


def test_averaged_models() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def average(net: nn.Module) -> dict[str, Any]:
        averaged = torch.optim.swa_utils.AveragedModel(net)
        for _ in range(3):
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(1.5)
            averaged.update_parameters(net)
        return {key: whole(value) for key, value in averaged.module.state_dict().items()}

    expected = average(copy.deepcopy(model))
    on_mesh(lambda mesh: assert_same(average(rows(model, mesh)), expected), 2)


class Symmetric(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.triu() + x.triu(1).T

    def right_inverse(self, x: Any) -> Any:
        return x.triu()


def test_parametrizations_of_distributed_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def parametrize(net: nn.Module) -> Any:
        nn.utils.parametrize.register_parametrization(net, "weight", Symmetric())
        return net.weight

    expected = parametrize(copy.deepcopy(model)).detach()

    def body(mesh: Any) -> None:
        torch.testing.assert_close(whole(parametrize(rows(model, mesh))), expected)

    on_mesh(body, 2)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_means_of_float16_do_not_overflow(placement: Any) -> None:
    """Their sum would: 65,504 is the largest."""
    value = torch.full((500, 40), 8.0, dtype=torch.float16)
    target = torch.zeros(500, dtype=torch.int64)
    logits = torch.zeros(500, 40).index_fill_(1, torch.tensor([1]), 200.0).half()

    def body(mesh: Any) -> None:
        x = distribute_tensor(value, mesh, [placement]).requires_grad_()
        total = x.mean() + nn.functional.mse_loss(x, x * 2)
        total.backward()
        assert total.item() == 8.0 + 64.0
        torch.testing.assert_close(whole(x.grad), torch.full_like(value, 17 / value.numel()))
        assert whole(x.mean(0)).tolist() == [8.0] * 40
        scores = distribute_tensor(logits, mesh, [placement])
        loss = nn.functional.cross_entropy(scores, distribute_tensor(target, mesh))
        assert loss.dtype == torch.float16
        assert loss.item() == 200.0

    on_mesh(body, 3)


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_parallel_computes_in_float32(autocast: bool) -> None:
    """Thirty is a sixteenth too coarse in bfloat16: e to the power of that would be six per cent off."""
    logits = torch.tensor([[30.3, 30.1, 29.9, 28.0]] * 300).bfloat16()
    target = torch.tensor([1] * 300)
    expected = logits.float().requires_grad_()
    nn.functional.cross_entropy(expected, target).backward()

    def body(mesh: Any) -> None:
        mine = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(mine, distribute_tensor(target, mesh))
        assert loss.dtype == (torch.float32 if autocast else torch.bfloat16)
        loss.backward()
        torch.testing.assert_close(whole(mine.grad).float(), expected.grad, rtol=0.005, atol=0)

    on_mesh(body, 2)
