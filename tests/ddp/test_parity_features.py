"""Join, optimizers in backward, buffers and errors, against PyTorch's in the same gloo processes.

Mixed precision is in test_parity_mixed.py.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp import cases
from ddp.test_parity_torch import join_torch
from phalanx.ddp import DistributedDataParallel
from processes import run_processes

pytestmark = pytest.mark.timeout(240)
BOTH = (DistributedDataParallel, TorchDDP)


def _on_torchs_group(worker, function):
    join_torch(worker)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own warn about themselves
            function(worker)
    finally:
        dist.destroy_process_group()


def _agree(models, exact, what):
    left, right = (model.module for model in models)
    for (name, a), b in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{what} {name}: {text}", **tolerance)


def _join(worker):
    for initial in (True, False):
        models = [kind(cases.make(cases.ConvNet)) for kind in BOTH]
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.join(divide_by_initial_world_size=initial):
                for step in range(20 - 3 * worker.rank):
                    optimizer.zero_grad()
                    cases.loss_of(model(cases.batch(step, worker.rank))).backward()
                    optimizer.step()
        # With an uneven number of active ranks 1/n is rounded: torch multiplies where it would divide.
        _agree(models, worker.size == 2, f"join {initial}")
    for kind in BOTH:
        done = []
        with pytest.raises(RuntimeError):
            _train_until_someone_is_done(kind(nn.Linear(8, 1)), worker.rank, done)
        assert done == [0, 1]


def _train_until_someone_is_done(model, rank, done):
    with model.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            model(cases.batch(step, rank)).sum().backward()
            done.append(step)


def _optimizers(worker):
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns about torch.jit when imported

    for optim, kwargs in [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]:
        models = [kind(cases.make(cases.Mlp)) for kind in BOTH]
        for model in models:
            model._register_fused_optim(optim, **kwargs)
            for step in range(20):
                model.zero_grad()
                cases.loss_of(model(cases.batch(step, worker.rank))).backward()
        # torch's functional optimizers do the same arithmetic in another order.
        _agree(models, False, f"fused {optim.__name__}")
    trained = []
    module = cases.make(cases.Mlp)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module)
    plain = DistributedDataParallel(cases.make(cases.Mlp))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(20):
        for one in (model, plain):
            one.zero_grad()
            cases.loss_of(one(cases.batch(step, worker.rank))).backward()
        optimizer.step()
        trained.append(all(param.grad is None for param in model.parameters()))
    assert all(trained)
    _agree([model, plain], worker.size == 2, "torch's way of attaching optimizers")


def _errors(worker):
    """The same mistakes raise the same kinds of errors.

    Not compared: modules that differ between ranks. Torch raises on some ranks and hangs on rank 0; ours is tested in
    test_changing_parameters.py.
    """
    frozen = nn.Linear(2, 2).requires_grad_(False)
    mistakes = [
        lambda kind: kind(frozen),
        lambda kind: kind(nn.LazyLinear(2)),
        lambda kind: kind(nn.Linear(2, 2), device_ids=[0, 1]),
        lambda kind: kind(nn.Linear(2, 2), device_ids=[0]),
        lambda kind: kind(nn.Linear(2, 2), output_device=1),
        lambda kind: kind(nn.Linear(2, 2), delay_all_reduce_named_params=[]),
        lambda kind: kind(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
        lambda kind: kind(nn.Linear(2, 2)).register_comm_hook(None, 3),
        lambda kind: kind(nn.Linear(2, 2)).register_comm_hook(None, _wrong_bucket),
        lambda kind: kind(nn.Linear(2, 2)).register_comm_hook(None, _wrong_result),
        lambda kind: kind(nn.Linear(2, 2))._set_ddp_runtime_logging_sample_rate(0),
        lambda kind: kind(nn.Linear(2, 2))._register_buffer_comm_hook(None, 3),
        lambda kind: _twice(kind(nn.Linear(2, 2))),
    ]
    for number, mistake in enumerate(mistakes):
        raised = []
        for kind in BOTH:
            with pytest.raises(Exception) as caught:  # which one is what is compared
                mistake(kind)
            raised.append(
                next(t for t in (TypeError, ValueError, AssertionError, RuntimeError) if caught.errisinstance(t))
            )
        assert raised[0] is raised[1], (number, raised)


def _wrong_bucket(state, bucket: int): ...


def _wrong_result(state, bucket) -> int: ...


def _twice(model):
    for _ in range(2):
        model.register_comm_hook(None, lambda state, bucket: None)


def _buffers(worker):
    for options in ({}, {"forward_sync_buffers": False}):
        models = [kind(cases.make(cases.ConvNet, seed=worker.rank), **options) for kind in BOTH]
        for model in models:
            for step in range(20):
                model.zero_grad()
                cases.loss_of(model(cases.batch(step, worker.rank))).backward()
        _agree(models, worker.size == 2, f"buffers {options}")


def _everything(worker):
    for function in (_join, _optimizers, _buffers, _errors):
        function(worker)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (3, 4))])
def test_features_behave_alike(size):
    run_processes(size, _on_torchs_group, _everything, timeout=200.0)


@pytest.mark.parametrize(("size", "feature"), [(3, _join), (4, _optimizers)])
def test_a_sample_of_features_on_more_ranks(size, feature):
    run_processes(size, _on_torchs_group, feature, timeout=200.0)
