"""The same training with PyTorch's DistributedDataParallel and with ours, in the same gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp import cases
from phalanx.ddp import DistributedDataParallel
from processes import run_processes

pytestmark = pytest.mark.timeout(240)
STEPS = 20


def join_torch(worker):
    """Torch's default group; ours is found through it."""
    host, port = worker.store_url.removeprefix("tcp://").rsplit(":", 1)
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=worker.rank, world_size=worker.size)


def _same_path(worker, names):
    join_torch(worker)
    try:
        for name in names:
            SCENARIOS[name](worker)
    finally:
        dist.destroy_process_group()


def train(model, rank, *, steps=STEPS, call=lambda model, x, step: model(x), accumulate=0, momentum=0.9):
    """Losses of a run; gradients and weights stay in the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(accumulate):
                cases.loss_of(call(model, cases.batch(step, 50 + rank + 10 * micro), step)).backward()
        loss = cases.loss_of(call(model, cases.batch(step, rank), step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def compare(worker, kind, *, ours=None, torchs=None, exact=None, **kwargs):
    # Two summands have one order; with more, the order depends on where a number lies in its bucket.
    exact = worker.size == 2 if exact is None else exact
    left = DistributedDataParallel(cases.make(kind), **(ours or {}))
    right = TorchDDP(cases.make(kind), **(torchs or {}))
    mine, theirs = (train(model, worker.rank, **kwargs) for model in (left, right))
    if exact:
        assert mine == theirs
    else:
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
    cases.assert_same(left.module, right.module, kind.__name__, exact=exact)


SCENARIOS = {
    **{
        name: lambda worker, kind=kind: compare(worker, kind, ours={"bucket_cap_mb": 0.02})
        for name, kind in cases.DENSE.items()
    },
    "unused": lambda worker: compare(
        worker,
        cases.Experts,
        torchs={"find_unused_parameters": True},
        call=lambda model, x, step: model(x, (step * worker.rank) % 2),
        momentum=0.0,
    ),
    "sparse": lambda worker: compare(worker, cases.Table, exact=False, momentum=0.0),
    "no_sync": lambda worker: compare(worker, cases.Mlp, accumulate=2),
    "views": lambda worker: compare(
        worker,
        cases.Mlp,
        ours={"gradient_as_bucket_view": True},
        torchs={"gradient_as_bucket_view": True},
    ),
    "static graph": lambda worker: compare(
        worker, cases.Transformer, ours={"static_graph": True}, torchs={"static_graph": True}
    ),
}


def _on_the_same_host(worker):
    """Ours on the fastest group for one host, which reduces in place in shared memory; torch's on gloo."""
    join_torch(worker)
    group = worker.group(backend="auto", timeout=120.0)
    for view in (False, True):
        options = {"process_group": group, "gradient_as_bucket_view": view, "bucket_cap_mb": 0.02}
        compare(worker, cases.Mlp, ours=options, accumulate=1)
        compare(worker, cases.ConvNet, ours=options)
    group.close()
    dist.destroy_process_group()
    return group.backend


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_host_transport_gives_the_same_training(size):
    backends = {outcome.value for outcome in run_processes(size, _on_the_same_host, timeout=200.0)}
    assert backends == {"shm"}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak), 4])
def test_twenty_steps_give_the_same_losses_gradients_and_weights(size):
    run_processes(size, _same_path, list(SCENARIOS), timeout=200.0)
