"""Tools of torch, and of those who build on it, that are handed our wrapper: what they ask of it, they get."""

from __future__ import annotations

import shutil
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp import cases
from ddp.test_parity_torch import join_torch
from phalanx.comm import simulate
from phalanx.ddp import DistributedDataParallel, Join
from processes import run_processes

pytestmark = pytest.mark.timeout(240)


def step(model, optimizer, number, rank):
    optimizer.zero_grad()
    cases.loss_of(model(cases.batch(number, rank))).backward()
    optimizer.step()


# ---- who asks for the class


@pytest.mark.fast
def test_the_wrapper_counts_as_torchs_class_and_is_none() -> None:
    """As accelerate, transformers, Lightning, timm and torchvision unwrap: by ``isinstance`` and ``module``."""

    def main(group):
        module = nn.Linear(2, 2)
        model = DistributedDataParallel(module)
        assert issubclass(DistributedDataParallel, TorchDDP)
        assert isinstance(model, (nn.DataParallel, TorchDDP)), "as a choice of several, as most ask"
        unwrapped = model.module if isinstance(model, TorchDDP) else model
        assert unwrapped is module
        assert not isinstance(module, TorchDDP)
        assert TorchDDP not in DistributedDataParallel.__mro__, "nothing is inherited"

    simulate(1).run(main)


# ---- checkpoints


def _checkpoints(worker, folder) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_state_dict,
    )

    def made(kind, seed):
        model = kind(cases.make(cases.Mlp, seed))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    for number, (source, target) in enumerate(
        [
            (TorchDDP, DistributedDataParallel),
            (DistributedDataParallel, TorchDDP),
            (DistributedDataParallel, _no_wrapper),
        ]
    ):
        model, optimizer = made(source, 0)
        step(model, optimizer, 0, worker.rank)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        assert not any(name.startswith("module.") for name in model_state)
        assert set(model_state) == set(model.module.state_dict())
        assert "layers.0.weight" in optimizer_state["state"]
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{number}")
        other, other_optimizer = made(target, 5)
        step(other, other_optimizer, 7, worker.rank)
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{number}")
        set_state_dict(other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        for one in (model, other):
            if target is not _no_wrapper:
                step(one, {id(model): optimizer, id(other): other_optimizer}[id(one)], 1, worker.rank)
        _same(getattr(model, "module", model), getattr(other, "module", other))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert (set(whole) == set(model.module.state_dict())) if worker.rank == 0 else not whole
        third, _ = made(target, 6)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(third, whole, options=options)
        _same(getattr(model, "module", model), getattr(third, "module", third))


def _no_wrapper(module):
    return module


def _same(left, right) -> None:
    for (name, one), other in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


# ---- pipelines


def _pipeline(worker) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def trained(wrap):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        stage = PipelineStage(wrap(module), 0, 1, torch.device("cpu"), group=groups[worker.rank])
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean())
        x = cases.batch(0, worker.rank)
        schedule.step(x, target=torch.zeros(6, 8))
        return [parameter.grad for parameter in module.parameters()]

    groups = [dist.new_group([rank]) for rank in range(worker.size)]
    for ours, theirs in zip(trained(DistributedDataParallel), trained(TorchDDP), strict=True):
        torch.testing.assert_close(ours, theirs)
        everyone = [torch.empty_like(ours) for _ in range(worker.size)]
        dist.all_gather(everyone, ours.contiguous())
        assert torch.equal(everyone[0], everyone[1]), "reduced over the replicas"


# ---- hooks


def _hooks(worker) -> None:
    """Functions of ``torch.distributed.algorithms.ddp_comm_hooks``, handed to our wrapper, do what they do in torch's.

    Not the quantization hooks and batched PowerSGD, which fail inside torch's wrapper too, on gloo and everywhere.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd

    def power():
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)

    for make_state, hook in [
        (lambda: None, default_hooks.allreduce_hook),
        (lambda: dist.group.WORLD, default_hooks.fp16_compress_hook),
        (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (lambda: None, debugging_hooks.noop_hook),
        (power, powerSGD_hook.powerSGD_hook),
        (lambda: local_sgd.PostLocalSGDState(None, dist.group.WORLD, 2), local_sgd.post_localSGD_hook),
    ]:
        models = [kind(cases.make(cases.Mlp)) for kind in (DistributedDataParallel, TorchDDP)]
        for model in models:
            model.register_comm_hook(make_state(), hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(4):
                step(model, optimizer, number, worker.rank)
        for (name, left), right in zip(models[0].module.named_parameters(), models[1].module.parameters(), strict=True):
            assert left.isfinite().all()
            # Buckets are cut alike here (one), but members lie in them in another order in the first step.
            # What PowerSGD draws depends on that order.
            if hook is not powerSGD_hook.powerSGD_hook:
                torch.testing.assert_close(
                    left, right, rtol=1e-3, atol=1e-3, msg=lambda t, n=name, h=hook: f"{h} {n}: {t}"
                )


# ---- optimizers


def _optimizers(worker) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    def redundant(model):
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)

    def local(model):
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        return PostLocalSGDOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), averager)

    for make_optimizer in (redundant, local):
        models = []
        for kind in (DistributedDataParallel, TorchDDP):
            model = kind(cases.make(cases.Mlp))
            optimizer = make_optimizer(model)
            for number in range(4):
                step(model, optimizer, number, worker.rank)
            models.append(model.module)
        _same(*models)
    # ZeRO inside backward: torch refuses gloo, whichever wrapper it is given.
    for kind in (DistributedDataParallel, TorchDDP):
        model = kind(cases.make(cases.Mlp), process_group=dist.group.WORLD, static_graph=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, overlap_with_ddp=True
        )
        with pytest.raises(RuntimeError, match="Gloo backend"):
            ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)


# ---- join


def _joins(worker) -> None:
    from torch.distributed.algorithms.join import Join as TorchJoin
    from torch.distributed.optim import ZeroRedundancyOptimizer

    results = []
    for kind, context in [
        (DistributedDataParallel, TorchJoin),
        (DistributedDataParallel, Join),
        (TorchDDP, TorchJoin),
        (TorchDDP, Join),
    ]:
        model = kind(cases.make(cases.Mlp), process_group=dist.group.WORLD)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        with context([model, optimizer]):
            for number in range(3 + 2 * worker.rank):
                step(model, optimizer, number, worker.rank)
        results.append(model.module)
    for other in results[:-1]:
        _same(results[-1], other)


def _everything(worker, folder, names) -> None:
    join_torch(worker)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own warn about themselves
            for name in names:
                function = globals()[name]
                function(*((worker, folder) if name == "_checkpoints" else (worker,)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("names", [["_checkpoints", "_pipeline"], ["_hooks", "_optimizers", "_joins"]])
def test_torchs_tools_work_on_our_wrapper(names) -> None:
    folder = tempfile.mkdtemp()
    try:
        run_processes(2, _everything, folder, names, timeout=200.0)
    finally:
        shutil.rmtree(folder)
