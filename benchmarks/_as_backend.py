"""Plain torch programs on ``torch.distributed.init_process_group("phalanx")`` against gloo, in one interleaved run.

``torch.distributed.all_reduce``, blocking and not, beside gloo's and beside the same call of our ``Group``; and a
training step of torch's own DistributedDataParallel, whose time is mostly communication, on either backend.

Run: ``python -m benchmarks._as_backend``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import phalanx  # noqa: F401  # registers the backend
from benchmarks._results import record
from benchmarks._turns import KB, MB, amount, compare, disturbance_told, on_ranks, rounds_for
from phalanx.comm import Group
from phalanx.comm.stores import connect

SIZES = [4 * KB, 256 * KB, 4 * MB, 32 * MB]


def wide_step(process_group: Any) -> Callable[[], None]:
    """One step of torch's DDP on 4 million parameters and few samples: little to compute, 16 MB to reduce."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4)))
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    samples = torch.randn(8, 1000)

    def step() -> None:
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()

    return step


def run_rank(rank: int, address: str, results: Any, size: int) -> None:
    torch.set_num_threads(1)
    store = connect(address).namespace("torch").as_c10d()
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size)
    ours = dist.group.WORLD
    group = getattr(ours, "group", ours)  # in older trees, which compare runs too, it had one instead of being one
    assert isinstance(group, Group)
    assert group.backend == "shm", group.backend
    gloo = dist.new_group(backend="gloo")

    def waited(tensor: torch.Tensor) -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        ways: dict[str, Callable[[], object]] = {
            "gloo": lambda t=tensor: dist.all_reduce(t, group=gloo),
            "phalanx": lambda t=tensor: dist.all_reduce(t),
            "async": lambda t=tensor: waited(t),
            "Group": lambda t=tensor: group.all_reduce(t),
        }
        timings = compare(ways, group.barrier, *rounds_for(nbytes, quick=False))
        if rank == 0:
            results.put((f"all_reduce {amount(nbytes)}", timings))
    timings = compare({"gloo": wide_step(gloo), "phalanx": wide_step(ours)}, group.barrier, rounds=12, calls=2)
    if rank == 0:
        results.put(("step of torch's DDP", timings))
        results.put(None)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    names = ("gloo", "phalanx", "async", "Group")
    print("plain torch on the phalanx backend, 2 ranks; medians in microseconds per call; ratio is gloo / phalanx")
    print(f"{'':<22}" + "".join(f"{name:>12}" for name in names) + f"{'ratio':>8}")
    with disturbance_told():
        for what, timings in on_ranks(2, run_rank, 2):
            cells = "".join(f"{timings[n].call * 1e6:>12.0f}" if n in timings else f"{'':>12}" for n in names)
            print(f"{what:<22}{cells}{timings['gloo'].call / timings['phalanx'].call:>7.1f}x", flush=True)
            record(f"comm/as backend/{what}", "us", timings["phalanx"].call * 1e6, timings["gloo"].call * 1e6)


if __name__ == "__main__":
    main()
