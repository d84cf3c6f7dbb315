"""Training on simulated ranks equals one device: worlds, meshes, with tensor parallelism, every way to run a model.

Tolerance: rtol 2e-5, atol 2e-6 (see ``models.assert_runs_close``): the batch is summed in another order, nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.models import MODELS, Transformer, assert_runs_close, batch, build, train
from fsdp.ranks import assert_as_one_device, on_ranks, shard, trained
from phalanx.comm import observe
from phalanx.fsdp import MixedPrecisionPolicy, fully_shard
from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor
from phalanx.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["mlp", "convnet", "tied"])
def test_any_number_of_ranks(kind, size):
    assert_as_one_device(lambda mesh: trained(shard(build(kind), mesh), mesh, steps=3), kind, size, steps=3)


@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_hybrid(shape):
    assert_as_one_device(lambda mesh: trained(shard(build("mlp"), mesh), mesh, steps=3), "mlp", *shape, steps=3)


class TensorParallel(nn.Module):
    """Two residual blocks whose layers are split over an axis of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.middle = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.middle:
            x = x + block(x)
        return self.last(x)

    def blocks(self) -> list[nn.Module]:
        return list(self.middle)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 2, 2)])
def test_with_tensor_parallelism(shape, sequence, monkeypatch):
    monkeypatch.setitem(MODELS, "split", TensorParallel)
    plan: dict[str, Any] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if sequence:
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(),
        }

    def body(mesh):
        model = build("split")
        for block in model.blocks():
            parallelize_module(block, mesh["split"], plan)
            if sequence:
                style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
                parallelize_module(block, mesh["split"], style)
        data = mesh["shard"] if mesh.ndim == 2 else mesh["replicate", "shard"]
        shard(model, data)
        weight = dict(model.named_parameters())["middle.0.1.weight"]
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.ndim == mesh.ndim
        return trained(model, data, steps=3)

    names = ("replicate", "shard", "split")[-len(shape) :]
    assert_as_one_device(body, "split", *shape, names=names, steps=3)


def test_with_loss_parallel():
    def loss_of(model, x, target):
        return nn.functional.cross_entropy(model(x), target)

    target = torch.arange(24) % 6
    expected = build_split()
    loss_of(expected, batch(0), target).backward()

    def body(mesh):
        model = build_split()
        parallelize_module(
            model, mesh["split"], {"last": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        )
        data = mesh["shard"]
        shard(model, data)
        rank = data.get_local_rank()
        with loss_parallel():
            loss_of(model, batch(0).chunk(2)[rank], target.chunk(2)[rank]).backward()
        for (name, parameter), one in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad.full_tensor(), one.grad, msg=lambda text, name=name: f"{name} {text}"
            )

    on_ranks(body, 2, 2, names=("shard", "split"))


def build_split() -> TensorParallel:
    torch.manual_seed(0)
    return TensorParallel()


def test_dims_of_a_larger_mesh_by_name():
    from phalanx.fsdp import DataParallelMeshDims

    def body(mesh):
        model = build("mlp")
        for module in model.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim)
                module.register_parameter(key, nn.Parameter(placed))
        dims = DataParallelMeshDims(shard="b", replicate="a")
        for block in model.blocks():
            fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        return trained(model, mesh, steps=2)

    assert_as_one_device(body, "mlp", 2, 2, names=("a", "b"), steps=2)


# ---- ways to run a model


class Checkpointed(Transformer):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((x.abs() * 7).long() % 19) + self.position.weight
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return self.predict(self.norm(h)).mean(1)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedInside(Transformer):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if "forward" not in layer.__dict__:
                inside = layer.forward
                layer.forward = lambda h, inside=inside: checkpoint(inside, h, use_reentrant=False)
        return super().forward(x)


class Reused(nn.Module):
    """One block runs three times, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(3, 3)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(x)

    def blocks(self) -> list[nn.Module]:
        return [self.block, self.unused, self.first]


class InPlace(nn.Module):
    """Writes in place to inputs and outputs of sharded modules, and to views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Unflatten(1, (4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.first(x))
        h += 1
        h[:, :2].mul_(2)
        return self.last(h.flatten(1))

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.block]


def frozen() -> Transformer:
    model = Transformer()
    for parameter in (*model.layers[0].parameters(), *model.layers[1].parameters()):
        parameter.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    model.layers[2].up.weight.requires_grad_(False)
    return model


KINDS = {
    "checkpointed": Checkpointed,
    "reentrant": CheckpointedReentrant,
    "inside": CheckpointedInside,
    "reused": Reused,
    "in place": InPlace,
    "frozen": frozen,
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_run(kind, keep, monkeypatch):
    monkeypatch.setitem(MODELS, kind, KINDS[kind])
    options = {"reshard_after_forward": not keep}
    assert_as_one_device(lambda mesh: trained(shard(build(kind), mesh, **options), mesh, steps=3), kind, 2, steps=3)


def test_several_forwards_and_an_evaluation_before_one_backward():
    def around(model, x):
        with torch.no_grad():
            model(x * 3)
        return torch.stack([model(x), model(x * 0.5)]).sum(0)

    options = {"steps": 3, "around_forward": around}
    assert_as_one_device(lambda mesh: trained(shard(build("tied"), mesh), mesh, **options), "tied", 2, **options)


def test_several_backwards_of_several_forwards():
    one = build("mlp")

    def backward(model):
        first, second = model(batch(0)).pow(2).mean(), model(batch(1)).mean()
        first.backward()
        second.backward()

    backward(one)

    def body(mesh):
        model = shard(build("mlp"), mesh)
        backward(model)
        for parameter, expected in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)

    on_ranks(body, 2)


@pytest.mark.parametrize("sync", [True, False])
def test_accumulated_gradients_with_replicas(sync):
    """Without the sum over replicas in between; and without any sum."""

    def settings(model, last):
        if sync:
            model.set_requires_all_reduce(last)
        else:
            model.set_requires_gradient_sync(last)

    options = {"steps": 2, "accumulate": 3}
    assert_as_one_device(
        lambda mesh: trained(shard(build("mlp"), mesh), mesh, before_backward=settings, **options),
        "mlp",
        2,
        2,
        **options,
    )


def test_other_dims_are_sharded_too():
    options = {"shard_placement_fn": lambda p: Shard(-1)}
    assert_as_one_device(lambda mesh: trained(shard(build("tied"), mesh, **options), mesh, steps=2), "tied", 3, steps=2)


def test_a_list_of_modules_is_one_unit():
    def body(mesh):
        model = build("mlp")
        fully_shard([model.first, model.second], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return trained(model, mesh, steps=3)

    assert_as_one_device(body, "mlp", 2, steps=3)


@pytest.mark.parametrize("mixed", [False, True])
def test_resharding_to_fewer_ranks_after_forward(mixed):
    def body(mesh):
        precision = MixedPrecisionPolicy(param_dtype=torch.float64 if mixed else None)
        model = shard(build("tied"), mesh, reshard_after_forward=2, mp_policy=precision)
        groups: list[int] = []
        with observe(lambda event: groups.append(event.group.size) if "gather" in event.name else None):
            trained(model, mesh, steps=1)
        assert groups[:10] == [4] * 5 + [2] * 5  # five units; in backward from two ranks
        model = shard(build("tied"), mesh, reshard_after_forward=2, mp_policy=precision)
        return trained(model, mesh, steps=3)

    assert_as_one_device(body, "tied", 4, steps=3)


def test_mixed_precision_sums_in_float32():
    """With reduce_dtype=float32 four ranks sum what bfloat16 cannot hold."""

    def body(mesh):
        layer = nn.Linear(1, 1, bias=False)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
        layer.set_gradient_divide_factor(1.0)
        value = 256.0 if mesh.get_rank() == 0 else 1.0
        seen = []
        layer.register_forward_hook(
            lambda module, args, out: seen.append((module.weight.dtype, args[0].dtype, out.dtype))
        )
        layer(torch.full((1, 1), value)).sum().backward()
        assert seen == [(torch.bfloat16,) * 3]
        assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
        return layer.weight.grad.full_tensor().item()

    assert on_ranks(body, 4) == [259.0] * 4


OPTIMIZERS = ["SGD", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop", "Adafactor"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    """Also Adafactor, whose statistics are of whole matrices: DTensor computes them so."""
    for foreach in (True, False):
        options = {
            "steps": 2,
            "make_optimizer": lambda parameters, foreach=foreach: getattr(torch.optim, name)(
                parameters, lr=1e-3, foreach=foreach
            ),
        }
        assert_as_one_device(lambda mesh, o=options: trained(shard(build("mlp"), mesh), mesh, **o), "mlp", 3, **options)


def test_muon_works_on_whole_matrices():
    """The bits of one device, over several steps; on each shard for itself it would be wrong."""
    grads = torch.randn(3, 12, 9, generator=torch.Generator().manual_seed(3))
    start = torch.randn(12, 9, generator=torch.Generator().manual_seed(4))

    def moved(weight, laid_out=lambda grad: grad, rows=slice(None), **options):
        with torch.no_grad():
            weight.copy_(laid_out(start[rows]))
        optimizer = torch.optim.Muon([weight], lr=0.1, **options)
        for grad in grads:
            weight.grad = laid_out(grad[rows].clone())
            optimizer.step()
        return weight.detach()

    for options in ({}, {"nesterov": False, "weight_decay": 0.0}):
        expected = moved(nn.Parameter(torch.zeros(12, 9)), **options)
        parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
        apart = torch.cat([moved(nn.Parameter(torch.zeros(4, 9)), rows=part, **options) for part in parts])
        assert (apart - expected).norm() > 0.1 * (expected - start).norm()

        def body(mesh, options=options, expected=expected):
            for dim in (0, 1):
                layer = nn.Linear(9, 12, bias=False)
                fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p, dim=dim: Shard(dim))
                found = moved(layer.weight, lambda t, dim=dim: distribute_tensor(t, mesh, [Shard(dim)]), **options)
                assert torch.equal(found.full_tensor(), expected)

        on_ranks(body, 3)


def test_clipping_counts_every_shard():
    options = {"steps": 3, "clip": 0.05}
    assert_as_one_device(lambda mesh: trained(shard(build("mlp"), mesh), mesh, **options), "mlp", 3, **options)


def test_autocast_and_scaler():
    def run(model, rows):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(rows(batch(step))).float().pow(2).mean()
            if step == 1:
                loss = loss * float("inf")  # one rank's overflow skips the step on all
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), [p.detach() for p in model.parameters()]

    scale, expected = run(build("mlp"), lambda x: x)

    def body(mesh):
        found, weights = run(shard(build("mlp"), mesh), lambda x: x.chunk(2)[mesh.get_rank()])
        assert found == scale == 4.0
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=2e-2, atol=2e-3)

    on_ranks(body, 2)


def test_runs_are_compared_at_all():
    one, other = train(build("mlp"), steps=1), train(build("mlp"), steps=1)
    other.gradients[0]["scale"] += 1e-3
    with pytest.raises(AssertionError, match="gradient of scale in step 0"):
        assert_runs_close(one, other, "changed")
