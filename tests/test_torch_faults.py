"""Fused SGD on half precision changes nothing in torch 2.13.0: refused by name wherever we would run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from phalanx import _torch_faults, shard
from phalanx.comm import simulate
from phalanx.ddp import DistributedDataParallel
from phalanx.ddp.hooks.optimizer_overlap import apply_optimizer_in_backward
from phalanx.ddp.hooks.post_local_sgd import PeriodicModelAverager, PostLocalSGDOptimizer
from phalanx.elastic import Job, RunOptions
from phalanx.tensor import Shard, distribute_tensor, init_device_mesh

pytestmark = pytest.mark.fast
HALVES = [torch.bfloat16, torch.float16]
REFUSED = r"SGD\(fused=True\) on a torch.b?float16 parameter.*Use fused=False"


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As in torch 2.13.0, also under a torch that has mended it."""
    if request.function is not test_what_is_said_of_the_kernel_is_what_it_does:
        monkeypatch.setattr(_torch_faults, "fused_sgd_moves", lambda dtype: dtype not in HALVES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_what_is_said_of_the_kernel_is_what_it_does(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(1000, dtype=dtype))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    assert bool((param != 1).all()) is _torch_faults.fused_sgd_moves(dtype)


def layer(dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(64, 64).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_dtensor(dtype: torch.dtype) -> None:
    def body(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for fused, refused in ((True, True), (False, False)):
            param = nn.Parameter(distribute_tensor(torch.ones(256, dtype=dtype), mesh, [Shard(0)]))
            param.sum().backward()
            optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
            if refused:
                with pytest.raises(ValueError, match=REFUSED):
                    optimizer.step()
            else:
                optimizer.step()
                assert torch.equal(param.full_tensor(), torch.full((256,), 0.5, dtype=dtype))
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):  # right in torch 2.13.0
            param = nn.Parameter(distribute_tensor(torch.ones(256, dtype=dtype), mesh, [Shard(0)]))
            param.sum().backward()
            kind([param], lr=0.5, fused=True).step()
            assert (param.full_tensor() < 1).all()

    simulate(2, timeout=60.0).run(body)


@pytest.mark.parametrize("dtype", HALVES)
def test_optimizers_in_backward_and_averagers(dtype: torch.dtype) -> None:
    def body(group: Any) -> None:
        model = DistributedDataParallel(layer(dtype))
        with pytest.raises(ValueError, match="_register_fused_optim: .*" + REFUSED):
            model._register_fused_optim(torch.optim.SGD, 0.1, fused=True)
        with pytest.raises(ValueError, match=REFUSED):
            model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=iter([model.module.bias]), fused=True)
        with pytest.raises(ValueError, match=REFUSED):
            apply_optimizer_in_backward(torch.optim.SGD, layer(dtype).parameters(), lr=0.1, fused=True)
        plain = torch.optim.SGD(layer(dtype).parameters(), 0.1, fused=True)
        with pytest.raises(ValueError, match=REFUSED):
            PostLocalSGDOptimizer(plain, PeriodicModelAverager(period=2, process_group=group)).step()
        DistributedDataParallel(layer(torch.float32))._register_fused_optim(torch.optim.SGD, 0.1, fused=True)

    simulate(2, timeout=60.0).run(body)


@pytest.mark.parametrize("dtype", HALVES)
def test_sharded_optimizer(dtype: torch.dtype) -> None:
    def body(group: Any) -> None:
        spec = shard.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        weight = shard.ones(spec, 256, 2, dtype=dtype, requires_grad=True)
        with pytest.raises(ValueError, match="ShardedOptimizer: .*" + REFUSED):
            shard.ShardedOptimizer({"w": weight}, torch.optim.SGD, lr=0.1, fused=True)
        optimizer = shard.ShardedOptimizer({"w": weight}, torch.optim.SGD, lr=0.1)
        optimizer.param_groups[0]["fused"] = True  # as a loaded state may
        weight.local_tensor().grad = torch.ones_like(weight.local_tensor())
        with pytest.raises(ValueError, match=REFUSED):
            optimizer.step()

    simulate(2, timeout=60.0).run(body)


@pytest.mark.parametrize("dtype", HALVES)
def test_job(dtype: torch.dtype) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 64, dtype=dtype), torch.ones(8))
    options: dict[str, Any] = {"num_slots": 2, "slot_batch_size": 2, "seed": 0}
    options["run"] = RunOptions(progress=False)
    model = layer(dtype)
    fused = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    with pytest.raises(ValueError, match="Job: .*" + REFUSED):
        Job(model, fused, data, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = Job(model, optimizer, data, **options)
    optimizer.param_groups[0]["fused"] = True  # as a loaded state may
    step = next(iter(job.steps(epochs=1)))
    for micro in step:
        micro.backward(model(micro.inputs).sum())
    with pytest.raises(ValueError, match=REFUSED):
        step.commit()
