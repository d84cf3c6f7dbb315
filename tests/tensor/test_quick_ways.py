"""Calls that take a short way (functions of ``torch.nn.functional``, runners compiled for types) heed what the long
way heeds: modes, policies, gradients, plain tensors, other meshes, dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from phalanx.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    communication_mode,
    distribute_tensor,
    implicit_replication,
)
from phalanx.tensor.core._modes import ImplicitCommunicationError
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.dispatch._runner_source import FLOAT, SEQUENCE, TENSOR, VALUE, runner_source

S0, S1, R = Shard(0), Shard(1), Replicate()


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ROWS, CLASSES = torch.tensor([[0, 3, 5], [1, 1, 4]]), torch.tensor([1, 0, 3, 2])

# Each with the plain tensors it takes: the first ones floating point.
CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), (values(4, 6),)),
    "layer_norm with weight": (lambda x, w: F.layer_norm(x, (6,), w), (values(4, 6), values(6))),
    "layer_norm with bias": (lambda x, b: F.layer_norm(x, [6], bias=b, eps=0.1), (values(4, 6), values(6))),
    "layer_norm with both": (
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1.0),
        (values(4, 6), values(6), values(6)),
    ),
    "softmax": (lambda x: F.softmax(x, -1), (values(4, 6),)),
    "softmax by name": (lambda x: F.log_softmax(x, dim=0), (values(4, 6),)),
    "softmax of doubles": (lambda x: F.softmax(x, 1, dtype=torch.float64), (values(4, 6),)),
    "embedding": (lambda w, i: F.embedding(i, w), (values(6, 4), ROWS)),
    "embedding with padding": (lambda w, i: F.embedding(i, w, padding_idx=-3), (values(6, 4), ROWS)),
    "embedding by frequency": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (values(6, 4), ROWS)),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), (values(4, 6), CLASSES)),
    "cross_entropy summed": (
        lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=3),
        (values(4, 6), CLASSES),
    ),
    "cross_entropy with weight": (
        lambda x, w, t: F.cross_entropy(x, t, w.detach(), reduction="none"),
        (values(4, 6), values(6).abs(), CLASSES),
    ),
    "cross_entropy smoothed": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.25, reduction="sum"),
        (values(4, 6), CLASSES),
    ),
    "addcmul": (lambda x, y: torch.addcmul(x, y, y, value=0.5), (values(4, 6), values(4, 6))),
    "sum kept": (lambda x: x.sum((1,), keepdim=True), (values(4, 6),)),
}


def given(mesh: Any, tensors: tuple[torch.Tensor, ...], layout: Any) -> list[Any]:
    made = []
    for t in tensors:
        x = distribute_tensor(t, mesh, [layout if t.dim() > getattr(layout, "dim", 0) else R])
        made.append(x.requires_grad_() if t.is_floating_point() else x)
    return made


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_with_and_without_them_being_needed(name: str) -> None:
    call, tensors = CALLS[name]

    def body(mesh: Any) -> None:
        plain = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        expected = call(*plain)
        expected.sum().backward()
        for layout in (S0, S1, R):
            leaves = given(mesh, tensors, layout)
            for _ in range(2):  # learned, and remembered
                with torch.no_grad():
                    assert not call(*leaves).requires_grad
                with torch.inference_mode():
                    torch.testing.assert_close(whole(call(*leaves)), expected.detach())
                result = call(*leaves)
                assert result.dtype is expected.dtype
                torch.testing.assert_close(whole(result), expected.detach())
                result.sum().backward()
                for leaf, one in zip(leaves, plain, strict=True):
                    if one.grad is not None:
                        torch.testing.assert_close(whole(leaf.grad), one.grad)
                        leaf.grad = None

    on_mesh(body, 2)


class Record(TorchFunctionMode):
    def __init__(self) -> None:
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "func"),
    [
        ("layer_norm with both", F.layer_norm),
        ("softmax", F.softmax),
        ("embedding", F.embedding),
        ("cross_entropy summed", F.cross_entropy),
    ],
)
def test_function_modes_see_the_function_and_tracing_is_refused(name: str, func: Any) -> None:
    call, tensors = CALLS[name]

    def body(mesh: Any) -> None:
        leaves = given(mesh, tensors, S0)
        expected = whole(call(*leaves))
        with Record() as record:
            result = call(*leaves)
        assert record.functions[0] is func
        torch.testing.assert_close(whole(result), expected)
        with pytest.raises(RuntimeError, match="tracing DTensors is not supported"):
            make_fx(lambda x: call(*leaves).to_local() + x)(torch.ones(1))

    on_mesh(body, 2)


@pytest.mark.parametrize(
    "name", ["layer_norm with both", "layer_norm with weight", "embedding", "cross_entropy summed"]
)
def test_plain_tensors_beside_them_are_refused_unless_allowed(name: str) -> None:
    call, tensors = CALLS[name]

    def body(mesh: Any) -> None:
        leaves = given(mesh, tensors, S0)
        expected = call(*tensors)
        call(*leaves)
        for odd in range(len(tensors)):
            mixed = [tensors[i] if i == odd else leaf for i, leaf in enumerate(leaves)]
            with pytest.raises(RuntimeError, match="plain tensor"):
                call(*mixed)
            with implicit_replication():
                torch.testing.assert_close(whole(call(*mixed)), expected)

    on_mesh(body, 2)


def test_communication_is_refused_and_counted() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(values(4, 6), mesh, [S1])
        weight = distribute_tensor(values(6), mesh, [R])
        for _ in range(2):
            with CommDebugMode() as seen:
                F.layer_norm(x, (6,), weight)
            assert seen.get_total_counts() == 1
            with (
                communication_mode("explicit"),
                pytest.raises(ImplicitCommunicationError, match="needs its input"),
            ):
                F.layer_norm(x, (6,), weight)
            with communication_mode("warn"), pytest.warns(UserWarning, match="needs its input"):
                F.softmax(x, -1)
        rows = distribute_tensor(values(4, 6), mesh, [S0])
        for _ in range(2):
            with communication_mode("explicit"):
                F.layer_norm(rows, (6,), weight)
                weight.requires_grad_()
                with pytest.raises(ImplicitCommunicationError, match="sums the gradient"):
                    F.layer_norm(rows, (6,), weight)
                with torch.no_grad():
                    F.layer_norm(rows, (6,), weight)
                weight.requires_grad_(False)

    on_mesh(body, 2)


def test_a_weight_on_a_part_of_the_mesh_is_promoted() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(values(4, 6), mesh, [S0, R])
        weight = distribute_tensor(values(6), mesh["tp"], [R])
        table = distribute_tensor(values(6, 4), mesh["tp"], [S1])
        rows = distribute_tensor(ROWS, mesh, [S0, R])
        for _ in range(2):
            torch.testing.assert_close(
                whole(F.layer_norm(x, (6,), weight)), F.layer_norm(values(4, 6), (6,), values(6))
            )
            torch.testing.assert_close(whole(F.embedding(rows, table)), F.embedding(ROWS, values(6, 4)))

    on_mesh(body, 2, 2)


def test_autocast_counts() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(values(4, 6).bfloat16(), mesh, [S0])
        plain = values(4, 6).bfloat16()
        for _ in range(2):
            assert F.softmax(x, -1).dtype is F.softmax(plain, -1).dtype is torch.bfloat16
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert F.softmax(x, -1).dtype is F.softmax(plain, -1).dtype
                assert F.layer_norm(x, (6,)).dtype is F.layer_norm(plain, (6,)).dtype
                assert F.softmax(x, -1)._local.dtype is F.softmax(x, -1).dtype

    on_mesh(body, 2)


def test_a_rule_that_asks_for_gradients_is_heard_in_either_case() -> None:
    """amax of a cut dim stays a partial maximum, but not where it must be differentiated."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(values(4, 6), mesh, [S0])
        for _ in range(2):
            assert x.amax(0).placements == (Partial("max"),)
            x.requires_grad_()
            with torch.no_grad():
                assert x.amax(0).placements == (Partial("max"),)
            best = x.amax(0)
            assert not best.placements[0].is_partial()
            best.sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(whole(x.grad).sum(0), torch.ones(6))
            x.grad = None
            x.requires_grad_(False)

    on_mesh(body, 2)


def test_results_are_not_inference_tensors_outside_of_inference_mode() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(values(4, 6), mesh, [S0])
        assert not x.is_inference()
        assert not (x + x).is_inference()
        with torch.inference_mode():
            y = x + x
            assert y.is_inference()
        assert y.is_inference()
        parameter = torch.nn.Parameter(x + x)
        (parameter * x).sum().backward()
        assert parameter.grad is not None
        with pytest.raises(RuntimeError, match="nference"):
            (y * parameter).sum().backward()

    on_mesh(body, 2)


def test_embedding_refuses_what_torch_refuses() -> None:
    def body(mesh: Any) -> None:
        rows, table = distribute_tensor(ROWS, mesh, [S0]), distribute_tensor(values(6, 4), mesh, [R])
        for padding in (6, -7):
            with pytest.raises(ValueError, match="6 rows"):
                F.embedding(rows, table, padding_idx=padding)
        with pytest.raises(NotImplementedError, match="max_norm"):
            F.embedding(rows, table, max_norm=1.0)

    on_mesh(body, 2)


def test_keywords_no_text_can_say_are_left_to_torch() -> None:
    assert runner_source([TENSOR, VALUE], ["lambda"]) is None
    assert runner_source([TENSOR, VALUE], ["a-b"]) is None

    def body(mesh: Any) -> None:
        x = distribute_tensor(values(4, 6), mesh, [S0])
        for name in ("lambda", "a-b", "nothing"):
            for _ in range(2):
                with pytest.raises(TypeError):
                    torch.sum(x, **{name: 1})

    on_mesh(body, 2)


def test_a_runner_is_a_function_of_its_arguments() -> None:
    source = runner_source([TENSOR, SEQUENCE, FLOAT, TENSOR], ["weight"])
    assert source is not None
    lines = [line.strip() for line in source.splitlines()]
    assert "v0, v1, v2, v3, = given" in lines
    assert "found = (number, func, v0._spec, tuple(v1), v2 if v2 in kept_floats else None, v3._spec)" in lines
    assert "return wrap(decision.call(a0, v1, v2, weight=a3), decision.plain)" in lines
    compile(source, "runner", "exec")


def test_two_ways_to_torch_function_are_one() -> None:
    assert DTensor.__torch_function__ is DTensor.__torch_function__  # bound once
    assert DTensor.__torch_function__.__self__ is DTensor
