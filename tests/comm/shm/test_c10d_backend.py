"""``torch.distributed.init_process_group("phalanx")``: plain torch programs, torch's own DDP included."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from processes import run_processes


def start(worker, backend: str, generation: int = 0):
    store = worker.store().namespace(f"torch/{backend}/{generation}").as_c10d()
    dist.init_process_group(
        backend, store=store, rank=worker.rank, world_size=worker.size, timeout=timedelta(seconds=60)
    )


def every_function_of_torch(worker) -> str:
    start(worker, "phalanx")
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = torch.arange(float(size))
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    assert x.eq(ranks.sum()).all()
    work = dist.all_reduce(x.fill_(rank), op=dist.ReduceOp.MAX, async_op=True)
    dist.barrier()
    work.wait()
    assert work.is_completed()
    assert x.eq(size - 1).all()
    dist.reduce(x.fill_(1.0), dst=0)
    assert x[0] == (size if rank == 0 else 1)
    dist.broadcast(x.fill_(rank), src=1)
    assert x.eq(1).all()
    outputs = [torch.empty(1) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([float(rank)]))
    assert torch.cat(outputs).equal(ranks)
    flat = torch.empty(size)
    dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]))
    assert flat.equal(ranks)
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, ranks.clone())
    assert part.item() == rank * size
    dist.reduce_scatter(part, list(ranks.split(1)), op=dist.ReduceOp.AVG)
    assert part.item() == rank
    dist.all_to_all(outputs, [torch.tensor([rank * 10.0 + r]) for r in range(size)])
    assert torch.cat(outputs).equal(ranks * 10 + rank)
    dist.all_to_all_single(flat, torch.full((size,), float(rank)))
    assert flat.equal(ranks)
    dist.gather(x, [torch.empty(3) for _ in range(size)] if rank == 0 else None, dst=0)
    dist.scatter(part, list(ranks.split(1)) if rank == 1 else None, src=1)
    assert part.item() == rank
    big = torch.full((1 << 20,), float(rank))
    received = torch.empty(1 << 20)
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, big, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    ):
        request.wait()
    assert received.eq((rank - 1) % size).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x.fill_(1.0), group=pair)
        assert x.eq(2).all()
    dist.barrier()
    carried_by = dist.group.WORLD.backend
    dist.destroy_process_group()
    return carried_by


def test_every_collective_of_torch_runs_on_shared_memory() -> None:
    assert [o.value for o in run_processes(3, every_function_of_torch)] == ["shm"] * 3


def train_with_torch_ddp(worker) -> tuple[int, bool]:
    from phalanx.comm import observe

    results, counts = [], []
    for backend in ("gloo", "phalanx"):
        start(worker, backend)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
        model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(worker.rank)
        with observe(lambda event: counts.append(event.name)):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 20, generator=generator)).square().mean().backward()
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
        dist.destroy_process_group()
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return counts.count("all_reduce"), same


def test_torch_ddp_trains_to_the_same_bits_as_on_gloo() -> None:
    for outcome in run_processes(2, train_with_torch_ddp):
        num_all_reduces, same = outcome.value
        assert num_all_reduces >= 5, "it went past our backend"
        assert same


@pytest.mark.timeout(240)  # a fresh import of torch takes a while on a busy machine
@pytest.mark.parametrize("order", ["import phalanx, torch", "import torch.distributed, phalanx", "import phalanx.comm"])
def test_importing_phalanx_registers_the_backend_in_any_order(order: str) -> None:
    program = f"{order}\nimport torch.distributed as d; assert 'PHALANX' in d.Backend._plugins, d.Backend._plugins"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_importing_phalanx_alone_imports_no_torch() -> None:
    program = "import sys, phalanx; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def lose_a_peer(worker, async_op: bool) -> str:
    import os
    import signal

    start(worker, "phalanx")
    dist.barrier()
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def reduce() -> None:
        work = dist.all_reduce(torch.ones(3), async_op=async_op)
        if async_op:
            work.wait()

    with pytest.raises(RuntimeError, match=r"rank 1 .* died") as caught:
        reduce()
    return type(caught.value).__name__


@pytest.mark.parametrize("async_op", [False, True])
def test_a_dead_peer_raises(async_op: bool) -> None:
    assert run_processes(2, lose_a_peer, async_op)[0].value == "PeerLost"
