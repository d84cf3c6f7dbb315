"""What torch offers beside its functions on tensors, called on DTensors: right, or refused with what to do instead.

Each row of a table is one way to slip; the pattern is what the user must read.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from meshes import on_mesh
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from phalanx.comm import init_device_mesh
from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor, implicit_replication

PLAIN = r"use d\.full_tensor\(\) or d\.to_local\(\)"
FUNC = r"torch\.autograd\.grad and torch\.autograd\.functional"


def refused(act: Callable[[], Any], pattern: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=pattern):
        act()


def distributed_linear(mesh: Any, *placements: Any) -> nn.Linear:
    layer = nn.Linear(4, 2)
    for name, value in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(value.detach(), mesh, placements or [Replicate()])))
    return layer


# ---- torch.func

TRANSFORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "grad": (lambda x: torch.func.grad(lambda t: (t * t).sum())(x), FUNC),
    "grad_and_value": (lambda x: torch.func.grad_and_value(lambda t: (t * t).sum())(x), FUNC),
    "vjp": (lambda x: torch.func.vjp(lambda t: t * 2, x), FUNC),
    "jacrev": (lambda x: torch.func.jacrev(lambda t: t * 2)(x), FUNC),
    "vmap": (lambda x: torch.vmap(lambda t: t * 2)(x), FUNC),
    "functionalize": (lambda x: torch.func.functionalize(lambda t: t * 2)(x), FUNC),
    "vmap of a captured one": (lambda x: torch.vmap(lambda t: x * 2)(torch.ones(3)), FUNC),
    "vmap beside a plain one": (
        lambda x: torch.vmap(lambda t: t * x)(torch.ones(3, 4)),
        "mul inside torch.func",
    ),
    "grad of a captured one": (
        lambda x: torch.func.grad(lambda t: (t.sum() * x).sum().full_tensor())(torch.ones(4)),
        r"mul inside torch\.func or torch\.vmap got a DTensor, at .*test_refusals\.py:\d+.*full_tensor\(\)",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name: str) -> None:
    act, pattern = TRANSFORMS[name]

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        refused(lambda: act(x), pattern)
        with implicit_replication():
            refused(lambda: act(x), pattern)

    on_mesh(body, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own use
def test_forward_mode_transforms() -> None:
    """On one rank: forward mode is a state of the process, not of a simulated rank."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        for act in (
            lambda: torch.func.jvp(lambda t: t * 2, (x,), (x,)),
            lambda: torch.func.jacfwd(lambda t: t * 2)(x),
            lambda: torch.func.hessian(lambda t: (t * t).sum())(x),
        ):
            refused(act, r"forward-mode .*use torch\.autograd\.functional\.jvp")
        refused(lambda: torch.func.linearize(lambda t: t * 2, x), "not work on a DTensor|not supported")

    on_mesh(body, 1)


def test_what_is_named_as_a_remedy_for_torch_func_works() -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(4.0)
        x = distribute_tensor(plain, mesh, [Shard(0)])
        cubes = torch.autograd.functional.jvp(lambda t: t**3, x, x)[1]
        assert torch.equal(cubes.full_tensor(), 3 * plain**3)
        matrix = torch.autograd.functional.jacobian(lambda t: t**2, x)
        assert torch.equal(matrix.full_tensor(), torch.diag(2 * plain))
        product = torch.autograd.functional.hvp(lambda t: (t**3).sum(), x, x)[1]
        assert torch.equal(product.full_tensor(), 6 * plain**2)

    on_mesh(body, 2)


def test_functional_call_is_right() -> None:
    def body(mesh: Any) -> None:
        layer = distributed_linear(mesh, Shard(0))
        x = distribute_tensor(torch.ones(3, 4), mesh)
        twice = {name: value * 2 for name, value in layer.named_parameters()}
        result = torch.func.functional_call(layer, twice, (x,))
        torch.testing.assert_close(result.full_tensor(), 2 * layer(x).full_tensor())
        result.sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.full_tensor().tolist() == [[6.0] * 4] * 2

    on_mesh(body, 2)


# ---- make_fx, torch.export, FakeTensor, torch.compile


class Doubling(nn.Module):
    """Uses a DTensor that is neither its parameter nor its input."""

    def __init__(self, captured: DTensor) -> None:
        super().__init__()
        self.captured = [captured]

    def forward(self, x: Any) -> Any:
        return x + (self.captured[0] * 2).full_tensor()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        for act in (
            lambda: make_fx(lambda t: t * 2, tracing_mode=mode)(x),
            lambda: make_fx(lambda t: t + x.sum(), tracing_mode=mode)(torch.ones(4)),
            lambda: make_fx(lambda t: t + x.full_tensor(), tracing_mode=mode)(torch.ones(4)),
        ):
            refused(act, "make_fx.*plain module before it is distributed")
        graph = make_fx(lambda t: t * 2, tracing_mode=mode)(x.to_local())
        assert graph(torch.ones(2)).tolist() == [2.0, 2.0]

    on_mesh(body, 1 if mode != "real" else 2)


def test_export() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
        layer = distributed_linear(mesh)
        for module, given in (
            (nn.Linear(4, 2), x),
            (layer, torch.ones(3, 4)),
            (layer, x),
            (Doubling(x), torch.ones(4)),
        ):
            refused(
                lambda module=module, given=given: torch.export.export(module, (given,)),
                r"torch\.export.*plain module before it is distributed",
            )
        plain = torch.export.export(nn.Linear(4, 2), (torch.ones(3, 4),))
        assert plain.module()(torch.ones(3, 4)).shape == (3, 2)

    on_mesh(body, 1)


def test_fake_tensors() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with FakeTensorMode() as mode:
            refused(lambda: mode.from_tensor(x), "FakeTensor of .*before it is distributed")
            refused(lambda: x * 2, "mul on a DTensor inside .*before it is distributed")
            refused(lambda: x.full_tensor(), "redistribute on a DTensor inside .*before it is distributed")
        refused(lambda: FakeTensorMode().from_tensor(x), "FakeTensor of .*before it is distributed")
        assert FakeTensorMode().from_tensor(torch.ones(3)).shape == (3,)

    on_mesh(body, 1)


def test_strict_export() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
        with pytest.raises(Exception, match=r"torch\.export.*plain module before it is distributed"):
            torch.export.export(nn.Linear(4, 2), (x,), strict=True)

    on_mesh(body, 1)


# ---- constructors and memory

CONSTRUCTORS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: torch.tensor(x),
    "Tensor": lambda x: torch.Tensor(x),
    "as_tensor of another dtype": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "asarray, copied": lambda x: torch.asarray(x, copy=True),
    "new_tensor of a plain one": lambda x: torch.ones(2).new_tensor(x),
    "coo": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1, 2, 3]]), x),
    "coo with size": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1, 2, 3]]), x, (9,)),
    "coo by its indices": lambda x: torch.sparse_coo_tensor(x.long().unsqueeze(0), torch.ones(4)),
    "csr": lambda x: torch.sparse_csr_tensor(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), x),
    "csc": lambda x: torch.sparse_csc_tensor(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), x, (2, 2)),
    "bsr": lambda x: torch.sparse_bsr_tensor(torch.tensor([0, 1]), torch.tensor([0]), x.view(1, 2, 2)),
    "bsc": lambda x: torch.sparse_bsc_tensor(torch.tensor([0, 1]), torch.tensor([0]), x.view(1, 2, 2)),
    "compressed": lambda x: torch.sparse_compressed_tensor(
        torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), x, layout=torch.sparse_csr
    ),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "a plain tensor's set_": lambda x: torch.ones(4).set_(x),
    "as_subclass": lambda x: x.as_subclass(nn.Parameter),
    "_make_subclass": lambda x: torch.Tensor._make_subclass(nn.Parameter, x),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:To copy construct")
def test_constructors_of_plain_tensors(name: str) -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        refused(lambda: CONSTRUCTORS[name](x), PLAIN)

    on_mesh(body, 2)


def test_nested_tensors() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        for act in (
            lambda: torch.nested.as_nested_tensor([x, x]),
            lambda: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
            lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged),
            lambda: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 4])),
            lambda: torch.nested.to_padded_tensor(x, 0.0),
        ):
            refused(act, r"nested tensors are not distributed; make one of to_local\(\) or full_tensor\(\)")

    on_mesh(body, 2)


def test_constructors_that_keep_the_tensor() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert torch.as_tensor(x) is x
        assert torch.asarray(x) is x
        assert nn.Buffer(x).placements == (Shard(0),)
        assert x.share_memory_() is x
        assert x.to_local().is_shared()
        layer = distributed_linear(mesh, Shard(0)).share_memory()
        assert layer.weight.placements == (Shard(0),)

    on_mesh(body, 2)


def test_arrays_and_packs_hold_the_whole_tensor() -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(4.0)
        x = distribute_tensor(plain, mesh, [Shard(0)])
        assert torch.equal(torch.from_numpy(np.asarray(x)), plain)
        assert torch.equal(torch.from_numpy(x.numpy()), plain)
        assert torch.tensor([x[1], x[2]]).tolist() == [1.0, 2.0]
        assert x.tolist() == plain.tolist()
        assert torch.equal(torch.from_dlpack(x), plain)
        assert np.array_equal(np.from_dlpack(x), plain.numpy())
        assert torch.equal(torch.from_dlpack(torch.to_dlpack(x)), plain)
        assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), plain)
        assert torch.equal(torch.from_dlpack(torch.to_dlpack(plain)), plain)
        for act in (
            lambda: x.clone().requires_grad_().numpy(),
            lambda: x.clone().requires_grad_().__dlpack__(),
        ):
            with pytest.raises((RuntimeError, BufferError), match="detach"):
                act()

    on_mesh(body, 2)


def test_a_plain_tensor_cannot_take_the_memory_of_a_dtensor() -> None:
    """Torch decides these without asking: it names the types or devices that differ, and leaves both as they were."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        plain = torch.ones(4)
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            plain.data = x
        with pytest.raises(RuntimeError, match="gradient"):
            plain.grad = x
        with pytest.raises(TypeError, match="meta"):
            torch.FloatTensor(x)
        assert plain.tolist() == [1.0] * 4
        assert plain.grad is None
        refused(lambda: plain.copy_(x), "copy got a plain tensor.*distribute it, or allow it")

    on_mesh(body, 2)


# ---- torch.distributed

COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda x, group: dist.all_reduce(x),
    "all_reduce, async": lambda x, group: dist.all_reduce(x, async_op=True),
    "reduce": lambda x, group: dist.reduce(x, 0),
    "broadcast": lambda x, group: dist.broadcast(x, 0),
    "all_gather": lambda x, group: dist.all_gather([torch.ones(4)], x),
    "all_gather into it": lambda x, group: dist.all_gather([x], torch.ones(4)),
    "all_gather_into_tensor": lambda x, group: dist.all_gather_into_tensor(torch.ones(4), x),
    "reduce_scatter": lambda x, group: dist.reduce_scatter(torch.ones(4), [x]),
    "reduce_scatter_tensor": lambda x, group: dist.reduce_scatter_tensor(x, torch.ones(4)),
    "all_to_all": lambda x, group: dist.all_to_all([torch.ones(4)], [x]),
    "all_to_all_single": lambda x, group: dist.all_to_all_single(x, torch.ones(4)),
    "gather": lambda x, group: dist.gather(x, [torch.ones(4)], 0),
    "scatter": lambda x, group: dist.scatter(x, [torch.ones(4)], 0),
    "functional all_reduce": lambda x, group: functional.all_reduce(x, "sum", group),
    "functional all_gather": lambda x, group: functional.all_gather_tensor(x, 0, group),
    "functional all_gather, differentiable": lambda x, group: functional.all_gather_tensor_autograd(x, 0, group),
    "functional reduce_scatter": lambda x, group: functional.reduce_scatter_tensor(x, "sum", 0, group),
    "send": lambda x, group: dist.send(x, 1),
    "irecv": lambda x, group: dist.irecv(x, 0),
    "list": lambda x, group: dist.all_reduce_coalesced([x]),
    "of the group itself": lambda x, group: group.allreduce([x]),
}


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_functions_of_torch_distributed() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), src_data_rank=None)
        for name, act in COLLECTIVES.items():
            with pytest.raises((RuntimeError, NotImplementedError)) as caught:
                act(x, dist.group.WORLD)
            assert "to_local()" in str(caught.value), f"{name}: {caught.value}"
    finally:
        dist.destroy_process_group()


# ---- torch.jit


def traced_ways(x: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    layer = distributed_linear(mesh)
    plain = torch.ones(4)
    return {
        "input": lambda: torch.jit.trace(lambda t: t * 2, (x,)),
        "single input": lambda: torch.jit.trace(lambda t: t * 2, x),
        "input by keyword": lambda: torch.jit.trace(nn.Linear(4, 2), example_kwarg_inputs={"input": x}),
        "parameter": lambda: torch.jit.trace(layer, (plain,)),
        "parameter inside": lambda: torch.jit.trace(nn.Sequential(layer), (plain,)),
        "trace_module": lambda: torch.jit.trace_module(layer, {"forward": (plain,)}),
        "captured operator": lambda: torch.jit.trace(lambda t: t + (x + x).to_local().sum(), (plain,)),
        "captured method": lambda: torch.jit.trace(lambda t: t + x.exp().to_local().sum(), (plain,)),
        "captured function": lambda: torch.jit.trace(lambda t: t + torch.sin(x).to_local().sum(), (plain,)),
        "captured and gathered": lambda: torch.jit.trace(lambda t: t + x.full_tensor(), (plain,)),
        "captured by a module": lambda: torch.jit.trace(Doubling(x), (plain,)),
        "made inside": lambda: torch.jit.trace(
            lambda t: (DTensor.from_local(t, mesh, [Replicate()]) * 2).to_local(), (plain,)
        ),
        "scripted": lambda: torch.jit.script(layer),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_traces_and_scripts() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        for name, act in traced_ways(x, mesh).items():
            (x + x).exp(), torch.sin(x)  # remembered before the trace begins
            with pytest.raises(NotImplementedError) as caught:
                act()
            told = str(caught.value)
            assert "inside torch.jit: it would record this rank's part" in told, f"{name}: {told}"
            assert "before it is distributed, or give it full_tensor()" in told, f"{name}: {told}"
            assert (x + x).sum().item() == 12, "after a trace all is as it was"

    on_mesh(body, 2)


def unmangled(graph: Any) -> str:
    """Torch numbers the types of modules that it has seen before."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(graph))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traces_of_plain_modules_are_as_ever() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(module, (x,))
    unwrapped = torch.jit._trace.trace(module, (x,))
    assert unmangled(traced.graph) == unmangled(unwrapped.graph)
    torch.testing.assert_close(traced(x), module(x))
    with pytest.warns(torch.jit.TracerWarning, match="Python boolean") as seen:
        torch.jit.trace(lambda t: t * 2 if t.sum() > 0 else t, (x,))
    assert {w.filename for w in seen if w.category is torch.jit.TracerWarning} == {__file__}
    assert torch.jit.trace.__name__ == "trace"
    assert torch.jit.script(module)(x).shape == (3, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_another_thread_computes_while_one_traces() -> None:
    """The refusal is for the tracing thread alone."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        found: list[float] = []

        def function(t: Any) -> Any:
            other = threading.Thread(target=lambda: found.append((x * 2).sum().item()))
            other.start()
            other.join()
            with pytest.raises(NotImplementedError, match=r"mul on a DTensor inside torch\.jit"):
                x * 2
            return t * 2

        traced = torch.jit.trace(function, (torch.ones(1),), check_trace=False)
        assert found == [12.0]
        assert traced(torch.ones(2)).tolist() == [2.0, 2.0]

    on_mesh(body, 1)


# ---- sparse gradients


def test_sparse_gradients_are_refused_at_the_call() -> None:
    def body(mesh: Any) -> None:
        weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        rows = torch.tensor([[1, 2], [5, 0]])
        x = distribute_tensor(rows, mesh, [Shard(0)])
        for placement in (Replicate(), Shard(0), Shard(1)):
            table = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
            layer = nn.Embedding(6, 4, sparse=True)
            layer.weight = table
            bags = nn.EmbeddingBag(6, 4, mode="sum", sparse=True)
            bags.weight = table
            for act in (
                lambda table=table: F.embedding(x, table, sparse=True),
                lambda table=table: F.embedding_bag(x, table, mode="sum", sparse=True),
                lambda table=table: torch.embedding(table, x, sparse=True),
                lambda table=table: torch.embedding(weight=table, indices=x, sparse=True),
                lambda layer=layer: layer(x),
                lambda bags=bags: bags(x),
            ):
                refused(act, r"embedding(_bag)?\(sparse=True\) on a DTensor: .*Pass sparse=False")
            with torch.no_grad():
                torch.testing.assert_close(layer(x).full_tensor(), F.embedding(rows, weight))
                torch.testing.assert_close(bags(x).full_tensor(), F.embedding_bag(rows, weight, mode="sum"))

    on_mesh(body, 2)
