"""What training scripts do around a compiled model: scalers, hooks, optimizers, copies, conversions, several models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import MLP, on_mesh, whole
from test_compile_programs import PLAN, fresh, values  # noqa: F401  # a fixture
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from phalanx.tensor.parallel import parallelize_module

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),  # optimizers import Inductor
]


def mlp(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(MLP(6, 10), mesh, PLAN)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def trained(model: nn.Module, call: Any, sizes: tuple[int, ...] = (4, 4, 4), *, compiles_step: bool = False) -> Any:
    """Losses and weights of some steps with a scaler and clipped gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if compiles_step:
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]  # as users do
    told: list[Any] = []
    for number, size in enumerate(sizes):
        x = (values(size, 6) * (number + 1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        told += [loss.detach(), whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)), x.grad]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*told, *(whole(parameter) for parameter in model.parameters())]


def same(some: Any, others: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def with_hooks(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.up.register_forward_hook(lambda module, args, result: result * 3)
    model.register_forward_hook(lambda module, args, result: result - 1)
    model.up.weight.register_hook(lambda gradient: gradient * 2)
    return model


def with_backward_hooks(model: nn.Module) -> nn.Module:
    model.register_full_backward_hook(lambda module, given, coming: (given[0] * 2,))
    return model


CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "hooks": (with_hooks, {"fullgraph": True}, {}),
    "a compiled optimizer": (lambda model: model, {"fullgraph": True}, {"compiles_step": True}),
    "hooks of backward": (with_backward_hooks, {}, {}),
    "symbols for sizes": (lambda model: model, {"dynamic": True}, {"sizes": (3, 5, 1, 7)}),
}
LONGER = ("hooks of backward", "symbols for sizes")  # for the long repetitions


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.soak if case in LONGER else ()) for case in CASES]
)
def test_a_script_trains_as_it_does_in_eager(case: str) -> None:
    change, options, given = CASES[case]

    def body(mesh: Any) -> None:
        eager, model = change(mlp(mesh)), change(mlp(mesh))
        call = torch.compile(model, backend="aot_eager", **options)
        sizes = {name: value for name, value in given.items() if name == "sizes"}
        wanted, found = trained(eager, eager, **sizes), trained(model, call, **given)
        if "compiles_step" not in given:
            assert same(wanted, found)
        for one, other in zip(wanted, found, strict=True):  # torch's AdamW rounds otherwise where it is compiled
            torch.testing.assert_close(other, one, rtol=0, atol=2e-5 * float(one.abs().max()))

    on_mesh(body, 2, timeout=500.0)


def test_a_compiled_model_is_converted_copied_saved_and_loaded() -> None:
    def body(mesh: Any) -> None:
        x, model = values(4, 6), mlp(mesh)
        call = compiled(model)
        expected = model(x)
        assert torch.equal(call(x), expected)
        assert list(call.state_dict()) == [f"_orig_mod.{name}" for name in model.state_dict()], "as torch has them"
        assert list(get_model_state_dict(call)) == list(model.state_dict())
        copied = copy.deepcopy(call)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(2)
        assert torch.equal(copied(x), copied._orig_mod(x))
        assert not torch.equal(copied(x), expected)
        copied.load_state_dict(call.state_dict())
        assert torch.equal(copied(x), expected)
        model.to(torch.float64)  # swaps the parameters, to which nothing may hold a weak reference
        assert torch.equal(call(x.double()), model(x.double()))
        assert model.up.weight.dtype is torch.float64

    on_mesh(body, 2, timeout=500.0)


def test_several_compiled_models_on_one_mesh() -> None:
    def body(mesh: Any) -> None:
        one, other, x = mlp(mesh), mlp(mesh), values(4, 6)
        with torch.no_grad():
            other.up.weight.mul_(3)
        first, second = compiled(one), compiled(other)
        for _ in range(2):
            assert torch.equal(first(x), one(x))
            assert torch.equal(second(x), other(x))
        assert torch.equal(second(first(x)), other(one(x)))

    on_mesh(body, 2, timeout=500.0)


@pytest.mark.parametrize("strict", [True, False])
def test_export_is_refused_in_words(strict: bool) -> None:
    def body(mesh: Any) -> None:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor"):
            torch.export.export(mlp(mesh), (values(4, 6),), strict=strict)

    on_mesh(body, 1, timeout=500.0)
