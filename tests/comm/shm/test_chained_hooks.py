"""Hooks whose continuations start and await further collectives, on the ``phalanx`` backend of torch.

The reference is gloo with one bucket: with two or more, gloo's own two threads both wait inside continuations, and
nobody is left to run what they wait for.
"""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.comm import observe
from phalanx.ddp import DistributedDataParallel
from phalanx.ddp.hooks._future import future_of
from processes import run_processes

pytestmark = pytest.mark.timeout(240)


def start(worker, backend: str, name: str) -> None:
    store = worker.store().namespace(f"torch/{backend}/{name}").as_c10d()
    dist.init_process_group(
        backend, store=store, rank=worker.rank, world_size=worker.size, timeout=timedelta(seconds=40)
    )


def three_collectives(state, bucket):
    """Sum, then the largest of the sums' norms, then a gather: each awaited in the continuation of the one before."""
    whole = bucket.buffer()

    def norm(future):
        largest = future.value()[0].norm().reshape(1).clone()
        return dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True).get_future().wait()[0]

    def gather(future):
        parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, whole / (1 + future.value()))
        return torch.stack(parts).mean(0)

    return dist.all_reduce(whole, async_op=True).get_future().then(norm).then(gather)


def power_sgd(hook, **options):
    settings = {
        "matrix_approximation_rank": 2,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 1,
        **options,
    }
    return hook, partial(powerSGD_hook.PowerSGDState, None, **settings)


HOOKS = {
    "PowerSGD": power_sgd(powerSGD_hook.powerSGD_hook),
    "PowerSGD in batches of one shape": power_sgd(powerSGD_hook.powerSGD_hook, batch_tensors_with_same_shape=True),
    "batched PowerSGD": power_sgd(powerSGD_hook.batched_powerSGD_hook),
    "three collectives": (three_collectives, lambda: None),
}


def orthogonalize(matrices, *args, whole=powerSGD_hook._orthogonalize):
    """Torch's batched hook passes one matrix to its own function, which takes stacks: it fails on every backend."""
    whole(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), *args)


def train(rank: int, hook, state, wrap) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
    model = wrap(net)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def compare(worker) -> list[str]:
    powerSGD_hook._orthogonalize = orthogonalize
    different = []
    for name, (hook, make_state) in HOOKS.items():
        results = []
        for backend, cap in (("gloo", 25.0), ("phalanx", 25.0), ("phalanx", 0.004)):
            start(worker, backend, f"{name}/{cap}")
            results.append(train(worker.rank, hook, make_state(), partial(TorchDDP, bucket_cap_mb=cap)))
            dist.barrier()
            dist.destroy_process_group()
        if not all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True)):
            different.append(name)
        if not all(torch.isfinite(p).all() for p in results[2]):
            different.append(f"{name} in several buckets")
    return different


def test_torch_ddp_with_chained_hooks_has_the_bits_of_gloo() -> None:
    for outcome in run_processes(2, compare, timeout=100):
        assert outcome.value == []


def order_of_calls(worker) -> tuple[list[int], list[float]]:
    """Sizes in the order of the calls; the first is held back until its continuation and another call are queued."""
    start(worker, "phalanx", "order")
    sizes: list[int] = []
    gate = threading.Event()

    def look(event) -> None:
        gate.wait(60)
        sizes.append(event.nbytes // 4)

    def send(size: int) -> dist.Work:
        return dist.all_reduce(torch.ones(size), async_op=True)

    with observe(look):
        first = send(1)
        later: list[dist.Work] = []

        def go_on(future) -> list[float]:
            inside = send(2).get_future().wait()[0]
            dist.all_reduce(torch.ones(3))
            later[0].wait()
            return [inside[0].item(), send(5).get_future().wait()[0][0].item()]

        held = first.get_future().then(go_on)
        later.append(send(4))
        gate.set()
        values = held.wait()
        dist.all_reduce(torch.ones(6))
        with pytest.raises(RuntimeError, match="division by zero"):
            send(7).get_future().then(lambda _: 1 / 0).wait()
    dist.destroy_process_group()
    return sizes, values


def test_what_a_continuation_sends_comes_before_what_was_queued_meanwhile() -> None:
    for outcome in run_processes(2, order_of_calls, timeout=100):
        sizes, values = outcome.value
        assert sizes == [1, 2, 3, 4, 5, 6, 7]
        assert values == [2.0, 2.0]


def lose_a_peer_inside(worker) -> str:
    start(worker, "phalanx", "death")
    dist.barrier()

    def die_or_wait(future):
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()

    chained = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(die_or_wait).then(lambda f: f.wait())
    with pytest.raises(RuntimeError, match=r"rank 1 .* died"):
        chained.wait()
    return "raised"


def test_a_death_inside_a_continuation_reaches_the_last_future() -> None:
    assert run_processes(2, lose_a_peer_inside, timeout=100)[0].value == "raised"


def three_of_ours(group, bucket):
    """The hook above in the words of our groups, on a future of ours."""
    whole = bucket.buffer()

    def norm(future):
        largest = future.value().norm().reshape(1).clone()
        group.all_reduce(largest, "max", async_op=True).wait()
        return largest

    def gather(future):
        parts = [torch.empty_like(whole) for _ in range(group.size)]
        group.all_gather(parts, whole / (1 + future.value()))
        return torch.stack(parts).mean(0)

    return future_of(group.all_reduce(whole, async_op=True), whole).then(norm).then(gather)


def train_with_ours(worker) -> tuple[list[str], bool]:
    results, carriers = [], []
    for backend, cap in (("gloo", 25.0), ("gloo", 0.004), ("auto", 25.0), ("auto", 0.004)):
        with worker.group(backend=backend, generation=len(results)) as group:
            carriers.append(group.backend)
            wrap = partial(DistributedDataParallel, process_group=group, bucket_cap_mb=cap)
            results.append(train(worker.rank, three_of_ours, group, wrap))
            group.barrier()
    same = all(torch.equal(a, b) for i in (0, 1) for a, b in zip(results[i], results[i + 2], strict=True))
    return carriers, same


def test_our_ddp_with_a_chained_hook_has_the_same_bits_on_both_transports() -> None:
    for outcome in run_processes(2, train_with_ours, timeout=100):
        assert outcome.value == (["gloo", "gloo", "shm", "shm"], True)
