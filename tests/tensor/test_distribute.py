"""``distribute_module`` as users call it: modules made without memory, functions around forward, state dicts that are
loaded; and moves of the dtypes that models are stored in.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from meshes import MLP, assert_same, gradients, on_mesh
from torch import Tensor, nn

from phalanx import comm
from phalanx.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    arange,
    distribute_module,
    distribute_tensor,
    implicit_replication,
    manual_seed,
)
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.fast


def by_rows(name: str, module: nn.Module, mesh: Any) -> None:
    """Cut the weights and biases of linear layers."""
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))


def initialised(module: nn.Module, seed: int, mesh: Any) -> None:
    manual_seed(seed, mesh)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def test_a_module_made_without_memory_gets_it_after_it_was_cut() -> None:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))

    def body(mesh: Any) -> None:
        with torch.device("meta"):
            deferred = network()
        distribute_module(deferred, mesh, by_rows)
        for tensor in (*deferred.parameters(), *deferred.buffers()):
            assert isinstance(tensor, DTensor)
            assert tensor.is_meta
        weight = deferred[0].weight
        assert weight.placements == (Shard(0),)
        assert weight.shape == (6, 4)
        assert weight.to_local().shape == (3, 4)
        deferred.to_empty(device="cpu")
        initialised(deferred, 7, mesh)

        at_once = distribute_module(network(), mesh)  # in another layout: values belong to elements
        initialised(at_once, 7, mesh)
        assert isinstance(deferred[0].weight, nn.Parameter)
        assert deferred[0].weight.placements == (Shard(0),)
        results = []
        for module in (deferred, at_once):
            out = module(distribute_tensor(data, mesh, [Shard(0)]))
            out.square().sum().backward()
            results.append({"out": out.full_tensor().detach(), **gradients(module)})
        assert_same(*results)
        assert_same(
            {name: b.full_tensor() for name, b in deferred.named_buffers()},
            {name: b.full_tensor() for name, b in at_once.named_buffers()},
        )

    on_mesh(body, 2)


def test_parallel_styles_cut_a_module_without_memory() -> None:
    def body(mesh: Any) -> None:
        with torch.device("meta"):
            deferred = MLP()
        parallelize_module(deferred, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        deferred.to_empty(device="cpu")
        initialised(deferred, 7, mesh)
        plain = MLP()
        plain.load_state_dict({name: p.full_tensor() for name, p in deferred.state_dict().items()})
        data = torch.ones(2, 6)
        torch.testing.assert_close(deferred(data), plain(data))

    on_mesh(body, 2)


def test_shared_parameters_without_memory_stay_shared() -> None:
    def body(mesh: Any) -> None:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            module[1].weight = module[0].weight
        distribute_module(module, mesh, by_rows)
        assert module[1].weight is module[0].weight
        assert module[0].weight.is_meta

    on_mesh(body, 2)


@pytest.mark.parametrize("src_data_rank", [0, None])
def test_a_tensor_without_memory_is_laid_out(src_data_rank: int | None) -> None:
    whole = torch.empty(5, 4, dtype=torch.float16, device="meta", requires_grad=True)

    def body(mesh: Any) -> None:
        sent: list[Any] = []
        for layout in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
            x = distribute_tensor(whole, mesh, layout, src_data_rank=src_data_rank)
            assert x.is_meta
            assert x.is_leaf
            assert x.requires_grad
            assert x.dtype == torch.float16
            assert x.placements == layout
            assert x.to_local().shape == x._spec.local_shape
            assert torch.empty_like(x, device="cpu").to_local().device.type == "cpu"
            with comm.observe(sent.append):
                moved = x.detach().redistribute(placements=[Shard(1), Replicate()])
                whole_again = x.full_tensor()
            assert moved.to_local().shape == moved._spec.local_shape
            assert whole_again.shape == (5, 4)
            assert whole_again.is_meta
            assert not sent

    on_mesh(body, 2, 2)


def test_memory_on_some_ranks_only_is_refused_on_all() -> None:
    def body(mesh: Any) -> None:
        device = "cpu" if mesh.get_rank() == 0 else "meta"
        with pytest.raises(ValueError, match="on the meta device on all or none"):
            distribute_tensor(torch.empty(4, device=device), mesh, [Shard(0), Replicate()])

    on_mesh(body, 2, 2)


def test_functions_around_forward_take_and_give_plain_tensors() -> None:
    plain = MLP()
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    reference = data.clone().requires_grad_()
    expected = plain(reference)
    expected.square().sum().backward()

    def body(mesh: Any) -> None:
        calls: list[Any] = []

        def enter(module: nn.Module, inputs: Any, given: Any) -> Any:
            calls.append(("in", module, given))
            x = DTensor.from_local(inputs[0], given, [Replicate()])
            return x.redistribute(placements=[Shard(0)])

        def leave(module: nn.Module, outputs: Any, given: Any) -> Any:
            calls.append(("out", module, given))
            assert isinstance(outputs, DTensor)
            return outputs.full_tensor()

        module = distribute_module(copy.deepcopy(plain), mesh, input_fn=enter, output_fn=leave)
        mine = data.clone().requires_grad_()
        out = module(mine)
        assert not isinstance(out, DTensor)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        torch.testing.assert_close(mine.grad, reference.grad)
        assert_same(gradients(module), gradients(plain))
        assert calls == [("in", module, mesh), ("out", module, mesh)]

    on_mesh(body, 2)


def test_functions_around_forward_may_return_nothing() -> None:
    def body(mesh: Any) -> None:
        seen: list[Any] = []
        module = distribute_module(
            nn.Linear(4, 2),
            mesh,
            input_fn=lambda module, inputs, mesh: seen.append(inputs),
            output_fn=lambda module, outputs, mesh: seen.append(outputs),
        )
        data = distribute_tensor(torch.ones(2, 4), mesh)
        out = module(data)
        assert seen[0][0] is data
        assert seen[1] is out

    on_mesh(body, 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_dict_is_assigned(device: str) -> None:
    def body(mesh: Any) -> None:
        source = distribute_module(MLP(), mesh, by_rows)
        with torch.device(device):
            target = MLP()
        distribute_module(target, mesh)
        target.load_state_dict(source.state_dict(), assign=True)
        for name, parameter in target.named_parameters():
            given = source.get_parameter(name)
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(parameter, DTensor)
            assert parameter.requires_grad
            assert parameter.placements == given.placements
            assert parameter.to_local().data_ptr() == given.to_local().data_ptr()
        target(distribute_tensor(torch.ones(2, 6), mesh)).sum().backward()
        assert gradients(target).keys() == dict(target.named_parameters()).keys()

    on_mesh(body, 2)


def test_a_plain_state_dict_is_loaded_as_replicas_if_told_so() -> None:
    plain = MLP()

    def body(mesh: Any) -> None:
        module = distribute_module(MLP(), mesh, by_rows)
        with pytest.raises(RuntimeError, match="plain tensor"):
            module.load_state_dict(plain.state_dict())
        with implicit_replication():
            module.load_state_dict(plain.state_dict())
        assert module.up.weight.placements == (Shard(0),)
        for name, value in plain.state_dict().items():
            assert torch.equal(module.get_parameter(name).full_tensor(), value)

    on_mesh(body, 2)


MOVES = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(1)),
    (Partial(), Replicate()),
    (Partial(), Shard(0)),
    (Partial("max"), Replicate()),
]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float16, torch.bfloat16], ids=str)
def test_moves_of_small_dtypes(dtype: torch.dtype) -> None:
    whole = torch.arange(15).view(5, 3).to(dtype)

    def body(mesh: Any) -> None:
        for before, after in MOVES:
            if before.is_partial():
                share = whole if before.is_partial("max") or mesh.get_rank() == 1 else torch.zeros_like(whole)
                x = DTensor.from_local(share, mesh, [before])
            else:
                x = distribute_tensor(whole, mesh, [before])
            moved = x.redistribute(placements=[after])
            assert moved.dtype == dtype
            assert torch.equal(moved.full_tensor(), whole), (before, after)

    on_mesh(body, 3)


def test_arange_may_require_a_gradient() -> None:
    def body(mesh: Any) -> None:
        x = arange(5, dtype=torch.float32, requires_grad=True, device_mesh=mesh, placements=[Shard(0)])
        assert x.is_leaf
        (x * x).sum().backward()
        assert x.grad is not None
        assert isinstance(x.grad.full_tensor(), Tensor)
        assert x.grad.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]

    on_mesh(body, 2)


def test_new_tensors_are_laid_out_as_the_one_that_made_them_if_they_have_its_shape() -> None:
    def body(mesh: Any) -> None:
        cut = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Replicate()])
        partial = cut.redistribute(placements=[Shard(0), Partial()])
        for x in (cut, partial):
            for made in (
                torch.zeros_like(x),
                torch.full_like(x, 3.0),
                x.new_ones(4, 2),
                x.new_full((4, 2), 3.0),
            ):
                assert made.placements == (Shard(0), Replicate())
                assert made.full_tensor().shape == (4, 2)
            for made in (x.new_zeros(7), x.new_empty((2, 4)), x.new_tensor([1.0, 2.0])):
                assert made.placements == (Replicate(), Replicate())

    on_mesh(body, 2, 2)
