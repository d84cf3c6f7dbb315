"""Tensor-parallel styles on simulated ranks give what one device gives: outputs, input gradients, weight gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import MLP, Attention, Block, assert_same, gradients, on_mesh, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.errors import RankFailed
from phalanx.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

pytestmark = pytest.mark.fast

MLP_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
ATTENTION_PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
}


def reference(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, input gradient and weight gradients on one device."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    out = module(x)
    out.square().sum().backward()
    return out.detach(), x.grad, gradients(module)


def check_plan(module: nn.Module, x: Tensor, apply: Callable[[nn.Module, Any], Any], size: int) -> None:
    """A plain replicated input goes in, and a plain replicated output comes out."""
    expected, expected_grad, expected_weights = reference(module, x)

    def body(mesh: Any) -> None:
        mine = copy.deepcopy(module)
        apply(mine, mesh)
        given = x.clone().requires_grad_()
        out = mine(given)
        assert type(out) is Tensor
        out.square().sum().backward()
        torch.testing.assert_close(out.detach(), expected)
        torch.testing.assert_close(given.grad, expected_grad)
        assert_same(gradients(mine), expected_weights)

    on_mesh(body, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mlp_by_columns_then_rows(size: int) -> None:
    torch.manual_seed(0)
    check_plan(MLP(6, 10), torch.randn(5, 6), lambda m, mesh: parallelize_module(m, mesh, MLP_PLAN), size)


@pytest.mark.parametrize("size", [2, 4])
def test_attention_by_heads(size: int) -> None:
    torch.manual_seed(0)
    check_plan(Attention(), torch.randn(2, 3, 8), lambda m, mesh: parallelize_module(m, mesh, ATTENTION_PLAN), size)


def test_sequence_parallel_block() -> None:
    """Norms run on parts of the sequence; the length is uneven on purpose."""
    torch.manual_seed(0)
    whole_input = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": whole_input,
        "attention.*": ColwiseParallel(use_local_output=False),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(use_local_output=False),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    del plan["attention.*"]
    for name in ("query", "key", "value"):
        plan[f"attention.{name}"] = ColwiseParallel(use_local_output=False)
    plan["attention.out"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan[""] = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
    )
    check_plan(Block(), torch.randn(2, 5, 8), lambda m, mesh: parallelize_module(m, mesh, plan), 2)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("size", [2, 3])
def test_embedding(style: type[ParallelStyle], size: int) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(7, 5)
    indices = torch.tensor([[0, 6, 3], [3, 3, 1]])
    plain = copy.deepcopy(module)
    plain(indices).square().sum().backward()

    def body(mesh: Any) -> None:
        options = {"output_layouts": Replicate()}
        if style is RowwiseParallel:
            options["input_layouts"] = Replicate()
        mine = parallelize_module(copy.deepcopy(module), mesh, style(**options))
        out = mine(indices)
        out.square().sum().backward()
        torch.testing.assert_close(out, module(indices))
        torch.testing.assert_close(whole(mine.weight.grad), plain.weight.grad)

    on_mesh(body, size)


def test_layouts_of_weights_inputs_and_outputs() -> None:
    def body(mesh: Any) -> None:
        model = parallelize_module(MLP(), mesh, MLP_PLAN)
        layouts = {name: p.placements for name, p in model.named_parameters()}
        assert layouts == {
            "up.weight": (Shard(0),),
            "up.bias": (Shard(0),),
            "down.weight": (Shard(1),),
            "down.bias": (Replicate(),),
        }
        part = model.up(torch.ones(2, 6))
        assert part.shape == (2, 5)
        kept = parallelize_module(nn.Linear(6, 4), mesh, ColwiseParallel(use_local_output=False))
        assert kept(torch.ones(3, 6)).placements == (Shard(1),)
        sharded = kept(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
        assert (sharded.placements, tuple(sharded.shape)) == ((Shard(1),), (4, 4))

    on_mesh(body, 2)


def test_the_pair_communicates_once_each_way() -> None:
    def body(mesh: Any) -> None:
        model = parallelize_module(MLP(), mesh, MLP_PLAN)
        x = torch.ones(4, 6, requires_grad=True)
        with CommDebugMode() as seen:
            out = model(x)
        assert seen.get_comm_counts() == {"all_reduce": 1}
        with CommDebugMode() as seen:
            out.sum().backward()
        assert seen.get_comm_counts() == {"all_reduce": 1}

    on_mesh(body, 2)


class TwoInputs(nn.Module):
    def forward(self, a: Any, b: Any, *, scale: Any = None) -> Any:
        self.seen = tuple(t.placements if isinstance(t, DTensor) else "plain" for t in (a, b, scale))
        return a * scale, b


@pytest.mark.parametrize("local", [False, True])
def test_prepare_inputs_by_position_and_keyword(local: bool) -> None:
    def body(mesh: Any) -> None:
        style = PrepareModuleInput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": Shard(0)},
            use_local_output=local,
        )
        module = parallelize_module(TwoInputs(), mesh, style)
        if local:
            a, _ = module(torch.full((1, 2), float(mesh.get_rank())), "kept", scale=torch.ones(2, 2))
            assert module.seen == ("plain", "plain", "plain")
            assert a.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        else:
            _, b = module(torch.ones(1, 2), "kept", scale=torch.ones(2, 2))
            assert module.seen == ((Replicate(),), "plain", (Shard(0),))
            assert b == "kept"

    on_mesh(body, 2)


def test_prepare_outputs_of_a_tuple() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
            return x, 3, x + 1

    def body(mesh: Any) -> list[Any]:
        style = PrepareModuleOutput(
            output_layouts=(Shard(0), None, Replicate()),
            desired_output_layouts=(Replicate(), None, Shard(0)),
        )
        module = parallelize_module(Split(), mesh, style)
        first, number, last = module(torch.arange(2.0) + 2 * mesh.get_rank())
        return [first.tolist(), number, last.shape[0]]

    assert on_mesh(body, 2) == [[[0.0, 1.0, 2.0, 3.0], 3, 1]] * 2


def test_patterns_name_many_layers() -> None:
    def body(mesh: Any) -> None:
        model = nn.ModuleDict({"layers": nn.ModuleList([MLP(), MLP()])})
        parallelize_module(model, mesh, {"layers.*.up": ColwiseParallel(), "layers.1.d*": RowwiseParallel()})
        assert isinstance(model["layers"][0].up.weight, DTensor)
        assert not isinstance(model["layers"][0].down.weight, DTensor)
        assert model["layers"][1].down.weight.placements == (Shard(1),)

    on_mesh(body, 2)


class ByChannels(ParallelStyle):
    """A style of a user's own: a convolution by its output channels."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def partition(name: str, part: nn.Module, mesh: Any) -> None:
            for key, p in list(part._parameters.items()):
                placed = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=self.src_data_rank)
                part.register_parameter(key, nn.Parameter(placed))

        return distribute_module(
            module,
            device_mesh,
            partition,
            lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
            lambda module, output, mesh: output.full_tensor(),
        )


def test_a_style_of_ones_own() -> None:
    torch.manual_seed(0)
    check_plan(nn.Conv1d(3, 4, 3), torch.randn(2, 3, 7), lambda m, mesh: parallelize_module(m, mesh, ByChannels()), 2)


def test_styles_under_autocast_and_checkpointing() -> None:
    """The replayed forward and the low precision are those of one device."""
    torch.manual_seed(0)
    model, x = MLP(6, 8), torch.randn(4, 6)

    def train(net: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(net, x, use_reentrant=False)
        out.float().square().sum().backward()
        return out.detach(), gradients(net)

    expected, expected_weights = train(copy.deepcopy(model))

    def body(mesh: Any) -> None:
        out, weights = train(parallelize_module(copy.deepcopy(model), mesh, MLP_PLAN))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        assert_same(weights, expected_weights, rtol=5e-2, atol=5e-2)

    on_mesh(body, 2)


def test_each_rank_may_cut_its_own_copy() -> None:
    def body(mesh: Any) -> Any:
        torch.manual_seed(mesh.get_rank())
        layer = nn.Linear(2, 2, bias=False)
        own = layer.weight.detach()[mesh.get_rank()].clone()
        with CommDebugMode() as seen:
            parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=None)
        assert seen.get_total_counts() == 0
        return torch.equal(layer.weight.to_local()[0], own)

    assert on_mesh(body, 2) == [True, True]


def test_two_axes_train_as_one_device() -> None:
    """Batch over dp with the gradient averaged by hand, weights over tp: the mesh is cut by its names."""
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(4, 6)
    _, _, expected = reference(model, x)

    def body(mesh: Any) -> None:
        mine = parallelize_module(copy.deepcopy(model), mesh["tp"], MLP_PLAN)
        rows = x.chunk(2)[mesh.get_local_rank("dp")]
        mine(rows).square().sum().backward()
        for parameter in mine.parameters():
            mesh.get_group("dp").all_reduce(parameter.grad.to_local())
        assert_same(gradients(mine), expected)

    on_mesh(body, 2, 2)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda mesh: parallelize_module(nn.ReLU(), mesh, ColwiseParallel()), "knows nn.Linear"),
        (lambda mesh: parallelize_module(MLP(), mesh, "colwise"), "a plan is"),
        (lambda mesh: parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())(input=1), "positional"),
        (lambda mesh: PrepareModuleInput(input_layouts=(Shard(0), Shard(0))), "desired"),
        (
            lambda mesh: parallelize_module(
                nn.Identity(),
                mesh,
                PrepareModuleOutput(output_layouts=(None, None), desired_output_layouts=(None,) * 2),
            )(1),
            "1 values for 2 layouts",
        ),
    ],
)
def test_mistakes_are_named(act: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(RankFailed, match=text):
        on_mesh(act, 2)


def test_a_mesh_of_two_axes_is_refused() -> None:
    with pytest.raises(RankFailed, match="one mesh axis"):
        on_mesh(lambda mesh: parallelize_module(MLP(), mesh, MLP_PLAN), 1, 2)


def test_a_key_that_names_nothing_is_warned_about() -> None:
    def body(mesh: Any) -> None:
        with pytest.warns(UserWarning, match="names no module"):
            parallelize_module(MLP(), mesh, {"upp": ColwiseParallel()})

    on_mesh(body, 1)
