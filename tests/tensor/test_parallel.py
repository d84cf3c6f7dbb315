"""Tensor-parallel styles against the plain module, and their communication."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx import comm
from phalanx.comm import init_device_mesh, observe
from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor
from phalanx.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

pytestmark = pytest.mark.fast


def on_mesh(body: Callable[..., Any], size: int = 2) -> list[Any]:
    return comm.simulate(size).run(lambda group: body(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2)]
        )
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: Any) -> Any:
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return self.head(x)


def full_grads(net: nn.Module) -> list[Any]:
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in net.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_a_megatron_style_net_matches_the_plain_one(size: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    tokens = torch.randint(0, 10, (2, 5))
    expected = plain(tokens)
    expected.square().sum().backward()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def body(mesh: Any) -> list[str]:
        net = parallelize_module(copy.deepcopy(plain), mesh, plan)
        seen: list[Any] = []
        with observe(seen.append):
            out = net(tokens)
        assert not isinstance(out, DTensor)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        for ours, reference in zip(full_grads(net), full_grads(plain), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
        return [e.name for e in seen if e.nbytes > 16]

    names = on_mesh(body, size)[0]
    assert names.count("all_reduce") == 3, "one for the embedding, one for each pair of linear layers"


def test_sequence_parallel_between_linear_layers() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    x = torch.randn(2, 4, 8)
    expected = plain(x)
    expected.square().sum().backward()

    def body(mesh: Any) -> None:
        net = copy.deepcopy(plain)
        parallelize_module(net[0], mesh, SequenceParallel())
        parallelize_module(net[1], mesh, ColwiseParallel(input_layouts=Shard(1), use_local_output=False))
        parallelize_module(net[3], mesh, RowwiseParallel(output_layouts=Shard(1), use_local_output=False))
        out = net(distribute_tensor(x, mesh, [Shard(1)]))
        assert out.placements == (Shard(1),)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.square().sum().backward()
        for ours, reference in zip(full_grads(net), full_grads(plain), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)

    on_mesh(body)


def test_inputs_and_outputs_are_prepared() -> None:
    class Two(nn.Module):
        def forward(self, a: Any, b: Any, *, c: Any) -> Any:
            assert [t.placements if isinstance(t, DTensor) else None for t in (a, b, c)] == [
                (Shard(0),),
                None,
                (Replicate(),),
            ]
            return a * 2, c

    def body(mesh: Any) -> None:
        module = parallelize_module(
            Two(),
            mesh,
            PrepareModuleInputOutput(
                input_layouts=(Replicate(), None),
                desired_input_layouts=(Shard(0), None),
                input_kwarg_layouts={"c": Shard(0)},
                desired_input_kwarg_layouts={"c": Replicate()},
                output_layouts=(Shard(0), Replicate()),
                desired_output_layouts=(Replicate(), Replicate()),
            ),
        )
        a, c = module(torch.ones(4, 2), torch.ones(1), c=torch.ones(2, 2))
        assert a.shape == (4, 2)
        assert c.shape == (4, 2)
        with pytest.raises(ValueError, match="for 2 layouts"):
            module(torch.ones(4, 2), c=torch.ones(2, 2))
        only = parallelize_module(
            nn.Identity(),
            mesh,
            PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        )
        assert only(torch.ones(2, 2)).shape == (4, 2)
        first = parallelize_module(
            nn.Identity(), mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        )
        assert first(torch.ones(2, 2)).shape == (4, 2)

    on_mesh(body)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_parallel_never_gathers_the_logits(reduction: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 7, generator=generator).requires_grad_()
    targets = torch.tensor([0, 6, 3, -100, 2, 5])
    weight = torch.rand(7, generator=generator) if weighted else None
    expected = F.cross_entropy(logits, targets, weight, reduction=reduction)
    expected.sum().backward()

    def body(mesh: Any) -> int:
        x = distribute_tensor(logits, mesh, [Shard(1)])
        y = distribute_tensor(targets, mesh)
        w = None if weight is None else distribute_tensor(weight, mesh)
        seen: list[Any] = []
        with loss_parallel(), observe(seen.append):
            loss = F.cross_entropy(x, y, w, reduction=reduction)
            loss.sum().backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        assert x.grad is not None
        assert x.grad.placements == (Shard(1),)
        torch.testing.assert_close(x.grad.full_tensor(), logits.grad)
        return max(e.nbytes for e in seen)

    assert max(on_mesh(body, 3)) <= 6 * 4, "one number per row"


def test_mistakes_are_named() -> None:
    def body(mesh: Any) -> None:
        with pytest.raises(NotImplementedError, match="LayerNorm"):
            parallelize_module(nn.LayerNorm(4), mesh, ColwiseParallel())
        with pytest.warns(UserWarning, match="names no module"):
            parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"7": ColwiseParallel()})
        with pytest.raises(TypeError, match="dict"):
            parallelize_module(nn.Linear(2, 2), mesh, "colwise")  # type: ignore[arg-type]  # the mistake

    on_mesh(body)
