"""What scripts for torch's FSDP2 do around a sharded model: each gives what the same lines give on one device."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp.models import Block, batch, build
from fsdp.ranks import on_ranks, shard
from fsdp.test_gradients_of_gradients import assert_same_gradients
from phalanx.tensor import DTensor, distribute_tensor


def stepped(model: Any, x: Tensor | None = None) -> Any:
    model(batch(0) if x is None else x).pow(2).mean().backward()
    return model


def _saves_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "selective": partial(checkpoint_wrapper, context_fn=partial(create_selective_checkpoint_contexts, _saves_products)),
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "offload": offload_wrapper,
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_torchs_wrappers_around_blocks(wrapper, after):
    def wrapped(model: Any) -> Any:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=WRAPPERS[wrapper], check_fn=lambda module: isinstance(module, Block)
        )
        return model

    def body(mesh):
        model = wrapped(shard(build("transformer"), mesh)) if after else shard(wrapped(build("transformer")), mesh)
        assert_same_gradients(stepped(model), stepped(build("transformer")))
        assert model.state_dict().keys() == build("transformer").state_dict().keys()

    on_ranks(body, 2)


def test_activations_kept_on_the_host():
    def body(mesh):
        model = shard(build("transformer"), mesh)
        with torch.autograd.graph.save_on_cpu():
            loss = model(batch(0)).pow(2).mean()
        loss.backward()
        assert_same_gradients(model, stepped(build("transformer")))

    on_ranks(body, 2)


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_and_clipping_by_parts(foreach, kind):
    def body(mesh):
        model, expected = stepped(shard(build("mlp"), mesh)), stepped(build("mlp"))
        norms = [
            get_total_norm([p.grad for p in one.parameters()], kind, error_if_nonfinite=True, foreach=foreach)
            for one in (model, expected)
        ]
        assert isinstance(norms[0], DTensor)
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        clip_grads_with_norm_(model.parameters(), 0.05, norms[0], foreach=foreach)
        clip_grad_norm_(expected.parameters(), 0.05, kind, foreach=foreach)
        assert_same_gradients(model, expected)

    on_ranks(body, 3)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers(name):
    def body(mesh):
        models = [shard(build("mlp"), mesh), build("mlp")]
        optimizers = [getattr(torch.optim, name)(one.parameters(), lr=1e-2, fused=True) for one in models]
        for step in range(3):
            for one, optimizer in zip(models, optimizers, strict=True):
                stepped(one, batch(step))
                optimizer.step()
                optimizer.zero_grad()
        for found, expected in zip(*(one.parameters() for one in models), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected.data, rtol=1e-4, atol=1e-5)

    on_ranks(body, 2)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_an_evaluation_in_inference_mode_comes_first(kind):
    """What is made for it serves training too."""

    def body(mesh):
        model, expected = shard(build(kind), mesh), build(kind)
        for _ in range(2):
            with torch.inference_mode():
                torch.testing.assert_close(model(batch(1)).clone(), expected(batch(1)))
            for one in (model, expected):
                one.zero_grad()
                stepped(one)
            assert_same_gradients(model, expected)

    on_ranks(body, 2)


def test_files_of_one_rank():
    """``torch.save`` of what a rank holds, loaded into another model laid out alike."""

    def trained(mesh):
        model = shard(build("tied"), mesh)
        return model, torch.optim.AdamW(model.parameters())

    def body(mesh):
        model, optimizer = trained(mesh)
        stepped(model)
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        for weights_only in (True, False):
            file.seek(0)
            saved = torch.load(file, weights_only=weights_only)
            other, state = trained(mesh)
            other.load_state_dict(saved["model"])
            state.load_state_dict(saved["optimizer"])
            for one, found in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(one.to_local(), found.to_local())
                assert torch.equal(optimizer.state[one]["exp_avg"].to_local(), state.state[found]["exp_avg"].to_local())

    on_ranks(body, 2)


def test_a_whole_state_is_distributed_and_assigned():
    """As torchtune and torchtitan load: built on the meta device, each tensor cut as its parameter is."""

    def body(mesh):
        whole = build("tied")
        with torch.device("meta"):
            model = shard(build("tied"), mesh)
        cut = {
            name: nn.Parameter(distribute_tensor(whole.state_dict()[name], there.device_mesh, there.placements))
            for name, there in model.state_dict().items()
        }
        model.load_state_dict(cut, assign=True)
        assert_same_gradients(stepped(model), stepped(whole))

    on_ranks(body, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.LSTM(6, 8, num_layers=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x)[0])

    def blocks(self) -> list[nn.Module]:
        return [self.layers]


class Parametrized(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(weight_norm(nn.Linear(6, 8)), spectral_norm(nn.Linear(8, 4)))

    def blocks(self) -> list[nn.Module]:
        return list(self)


@dataclass
class Output:
    logits: Tensor
    kept: dict[str, list[Tensor]]


class Structured(nn.Module):
    """Blocks that take and give dataclasses, dicts and lists, by keyword too."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, before: Output | None = None) -> Output:
            y = self.layer(x if before is None else x + before.logits)
            return Output(y, {"twice": [y * 2]})

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Part(), self.Part()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(first.kept["twice"][0], before=first).logits

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.last]


class LowRank(nn.Sequential):
    """Frozen weights beside small trained ones."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x) + self.up(self.down(x))

    def __init__(self) -> None:
        super().__init__(self.Part(), nn.ReLU(), self.Part())

    def blocks(self) -> list[nn.Module]:
        return [self[0], self[2]]


@pytest.mark.parametrize("kind", [Recurrent, Parametrized, Structured, LowRank])
def test_modules_of_other_kinds(kind):
    def made() -> Any:
        torch.manual_seed(0)
        return kind()

    def body(mesh):
        model, expected = shard(made(), mesh), made()
        for step in range(2):
            assert_same_gradients(stepped(model, batch(step)), stepped(expected, batch(step)))

    on_ranks(body, 2)


def test_dtypes_are_changed_between_steps():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        for dtype in (torch.bfloat16, torch.float64, torch.float32):
            model.to(dtype)
            model.zero_grad()
            stepped(model, batch(0).to(dtype))
            assert {p.grad.dtype for p in model.parameters()} == {dtype}

    on_ranks(body, 2)
