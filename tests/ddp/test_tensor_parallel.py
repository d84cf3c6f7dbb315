"""Data parallelism over a tensor-parallel module: four ranks as 2 replicas of 2 parts train as one device does."""

from __future__ import annotations

import copy
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.test_parity_torch import join_torch
from phalanx.comm import DeviceMesh, Group, current_group, init_device_mesh, simulate
from phalanx.ddp import DistributedDataParallel, ReplicaDrift, ReplicaMismatch, _MixedPrecision
from phalanx.ddp.hooks import default, optimizer_overlap, post_local_sgd, powersgd
from phalanx.errors import RankFailed
from phalanx.shard import ChunkShardingSpec, ShardedTensor
from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from processes import run_processes

STEPS = 5
EPS = 1e-3  # so that the rounding of a gradient near zero does not become a whole step


class Block(nn.Module):
    """Weights that are cut (one of them large, some small), plain ones beside them, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4096)
        self.down = nn.Linear(4096, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.abs().sum()
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def block(seed: int = 0) -> Block:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Block()


def tensor_parallel(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    return parallelize_module(block(seed), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch(step: int, replica: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + replica))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 0.3).square().mean()


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def train(model: DistributedDataParallel, replica: int, *, steps: int = STEPS, accumulate: bool = False) -> list[float]:
    """Return the norms that clipping saw."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                loss_of(model, batch(step, 4 + replica)).backward()
        loss_of(model, batch(step, replica)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
    return norms


def train_on_one_device(*, accumulate: bool = False) -> tuple[nn.Module, list[float]]:
    model = block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for first in (4, 0) if accumulate else (0,):
            loss_of(model, torch.cat([batch(step, first), batch(step, first + 1)])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return model, norms


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_trained_alike(model: nn.Module, expected: nn.Module) -> None:
    for (name, actual), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            whole(actual), other.detach(), rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.fast
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_two_replicas_of_two_parts_train_as_one_device(view: bool, accumulate: bool) -> None:
    expected, expected_norms = train_on_one_device(accumulate=accumulate)

    def main(group: Group) -> None:
        mesh = mesh_of_four()
        replica = mesh.get_coordinate()[0]
        # Replicas begin differently: the wrapper gives all the parts of the first.
        model = DistributedDataParallel(
            tensor_parallel(mesh, seed=replica),
            device_mesh=mesh["dp"],
            gradient_as_bucket_view=view,
            fingerprint_every=2,
        )
        norms = train(model, replica, accumulate=accumulate)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=1e-5)
        weight = model.module.up.weight
        for distributed in (weight, weight.grad):
            assert isinstance(distributed, DTensor)
            assert distributed.placements == (Shard(0),)
        assert weight.grad is weight.grad, "asked twice, it is one object, as of any parameter"
        if not accumulate:
            storage = weight.grad.to_local().untyped_storage()
            assert storage.nbytes() > weight.to_local().nbytes, "the gradient lies in a bucket"
        assert_trained_alike(model.module, expected)
        twin = copy.deepcopy(model)
        train(twin, replica, steps=1)
        train(model, replica, steps=1)
        for (name, left), right in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(whole(left), whole(right)), name

    simulate(4).run(main)


def test_on_processes_with_checkpoints_that_move_to_one_device() -> None:
    run_processes(4, _on_processes, tempfile.mkdtemp(), timeout=200.0)


def _on_processes(worker, folder) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    join_torch(worker)
    mesh = mesh_of_four()
    replica = mesh.get_coordinate()[0]
    expected, expected_norms = train_on_one_device()
    for view in (False, True):
        model = DistributedDataParallel(
            tensor_parallel(mesh, seed=replica), device_mesh=mesh["dp"], gradient_as_bucket_view=view
        )
        torch.testing.assert_close(train(model, replica), expected_norms, rtol=1e-4, atol=1e-5)
        assert_trained_alike(model.module, expected)
    state = get_model_state_dict(model)
    assert isinstance(state["up.weight"], DTensor)
    dcp.save(state, checkpoint_id=folder)
    alone = block(seed=7)
    plain = get_model_state_dict(alone)
    dcp.load(plain, checkpoint_id=folder)
    set_model_state_dict(alone, plain)
    assert_trained_alike(alone, expected)
    again = DistributedDataParallel(tensor_parallel(mesh, seed=8), device_mesh=mesh["dp"])
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state)
    assert_trained_alike(again.module, expected)
    dist.barrier()
    if worker.rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


def _close_to_the_mean(model: DistributedDataParallel, mesh: DeviceMesh, tolerance: float) -> None:
    plain = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"])
    replica = mesh.get_coordinate()[0]
    for step in range(4):
        for one in (model, plain):
            one.zero_grad()
            loss_of(one, batch(step, replica)).backward()
        for (name, left), right in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                whole(left.grad), whole(right.grad), rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
            )


@pytest.mark.fast
def test_hooks_reduce_parts_over_the_replicas_only() -> None:
    """Also where the state names no group: the current one has the other parts in it."""

    def main(group: Group) -> None:
        mesh = mesh_of_four()
        assert current_group().size == 4
        states = [(default.allreduce_hook, None, 0.0), (default.fp16_compress_hook, None, 1e-2)]
        states.append((powersgd.powerSGD_hook, powersgd.PowerSGDState(None, start_powerSGD_iter=2), 1.0))
        states.append((post_local_sgd.post_localSGD_hook, post_local_sgd.PostLocalSGDState(None, None, 100), 0.0))
        for hook, state, tolerance in states:
            model = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"])
            model.register_comm_hook(state, hook)
            _close_to_the_mean(model, mesh, tolerance)

    simulate(4).run(main)


@pytest.mark.fast
def test_optimizers_in_backward_step_distributed_parameters() -> None:
    def main(group: Group) -> None:
        mesh = mesh_of_four()
        replica = mesh.get_coordinate()[0]
        fused = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"])
        fused._register_fused_optim(torch.optim.SGD, lr=0.1)
        module = tensor_parallel(mesh)
        optimizer_overlap.apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), lr=0.1)
        attached = DistributedDataParallel(module, device_mesh=mesh["dp"])
        plain = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"])
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            for model in (fused, attached, plain):
                model.zero_grad()
                loss_of(model, batch(step, replica)).backward()
            optimizer.step()
        for model in (fused, attached):
            for left, right in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(whole(left), whole(right), rtol=0, atol=0)
        averager = post_local_sgd.PeriodicModelAverager(period=2)
        with pytest.raises(ValueError, match="needs the group of their replicas"):
            averager.average_parameters(plain.parameters())

    simulate(4).run(main)


@pytest.mark.fast
def test_replicas_with_less_data_join_and_get_the_parts_of_the_last() -> None:
    def main(group: Group) -> list[torch.Tensor]:
        mesh = mesh_of_four()
        replica = mesh.get_coordinate()[0]
        model = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(2 + 2 * replica):
                optimizer.zero_grad()
                # A part that has no more data takes part in its own replicas' collectives only.
                loss_of(model, batch(step, replica)).backward()
                optimizer.step()
        return [whole(parameter) for parameter in model.parameters()]

    first, *others = simulate(4).run(main)
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert torch.equal(left, right)


@pytest.mark.fast
def test_mixed_precision_and_drift_of_parts() -> None:
    def main(group: Group) -> None:
        mesh = mesh_of_four()
        replica = mesh.get_coordinate()[0]
        low = _MixedPrecision(param_dtype=torch.bfloat16)
        model = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"], mixed_precision=low)
        loss = loss_of(model, batch(0, replica))
        assert loss.dtype is torch.bfloat16
        loss.backward()
        assert model.module.up.weight.grad.dtype is torch.float32
        watched = DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["dp"], fingerprint_every=1)
        loss_of(watched, batch(0, replica)).backward()
        if group.rank == 3:
            watched.module.up.weight.to_local().data[0, 0] += 1
        loss_of(watched, batch(0, replica)).backward()

    with pytest.raises(RankFailed) as caught:
        simulate(4).run(main)
    assert isinstance(caught.value.__cause__, ReplicaDrift)
    assert caught.value.__cause__.parameter == "up.weight"


@pytest.mark.fast
def test_what_cannot_be_trained_is_refused() -> None:
    def main(group: Group) -> None:
        mesh = mesh_of_four()
        with pytest.raises(ReplicaMismatch, match=r"'up.weight' has part \[0\] of \[tp:S\(0\)\], shape \(4096, 8\)"):
            DistributedDataParallel(tensor_parallel(mesh), device_mesh=mesh["tp"])
        module = nn.Linear(8, 8)
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0), Replicate()]))
        with pytest.raises(ReplicaMismatch, match="part"):  # cut along the axis of the replicas
            DistributedDataParallel(module, device_mesh=mesh["dp"])
        module = nn.Linear(8, 8)
        module.weight = nn.Parameter(
            ShardedTensor(ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)]), 8, 8), requires_grad=False
        )
        with pytest.raises(TypeError, match="'weight' data-parallel: a ShardedTensor has no local tensor"):
            DistributedDataParallel(module)

    simulate(4).run(main)


def test_torchs_own_dtensors_are_refused_by_name() -> None:
    run_processes(1, _torchs_own, timeout=100.0)


def _torchs_own(worker) -> None:
    from torch.distributed.device_mesh import init_device_mesh as torchs_mesh
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor import distribute_tensor as torchs_distribute

    join_torch(worker)
    mesh = torchs_mesh("cpu", (1,))

    def cut(name, module, mesh):
        for own, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(own, nn.Parameter(torchs_distribute(param, mesh, [TorchShard(0)])))

    module = distribute_module(nn.Linear(4, 4), mesh, cut)
    with pytest.raises(TypeError, match="'weight' data-parallel: it is torch's own DTensor"):
        DistributedDataParallel(module)
    dist.destroy_process_group()
