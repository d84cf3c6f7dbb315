"""Same-host transport against gloo: time per collective and size, in one interleaved run.

For 2 and 4 ranks, each round times gloo, shared memory, shared memory on shared tensors and one memcpy of the same
bytes in turns (``_turns``); medians are printed, and the ratio gloo / ours. Bytes are those of the larger side of the
collective.

Run: ``python -m benchmarks._same_host [--quick] [--ranks 2 4] [--kinds all_reduce] [--up-to 4]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._results import record
from benchmarks._turns import KB, MB, Timing, amount, compare, disturbance_told, on_ranks, rounds_for
from phalanx.comm import Group
from phalanx.comm.stores import connect

KINDS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
SIZES = [4 * KB, 64 * KB, 256 * KB, 4 * MB, 32 * MB, 128 * MB]
OTHER_SIZES = [4 * KB, 256 * KB, 4 * MB, 32 * MB, 128 * MB]
GOALS = {4 * KB: 15.0, 256 * KB: 8.0, 4 * MB: 6.0, 128 * MB: 2.5}
SHARED_GOALS = {128 * MB: 3.5}


def contenders(kind: str, nbytes: int, gloo: Any, group: Group) -> dict[str, Callable[[], object]]:
    """What is timed, by name; all on float32."""
    size, count = group.size, nbytes // 4
    part = count // size
    whole, other = torch.ones(count), torch.ones(count)
    small = torch.ones(part)
    shared = group.shared_empty((count,), torch.float32).fill_(1.0)
    shared_part = group.shared_empty((part,), torch.float32).fill_(1.0)
    broadcast = dist.BroadcastOptions()
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "all_reduce": {
            "gloo": lambda: gloo.allreduce([whole]).wait(),
            "shm": lambda: group.all_reduce(whole),
            "shared": lambda: group.all_reduce(shared),
        },
        "broadcast": {
            "gloo": lambda: gloo.broadcast([whole], broadcast).wait(),
            "shm": lambda: (group.broadcast(whole, 0), group.barrier()),
            "shared": lambda: (group.broadcast(shared, 0), group.barrier()),
        },
        "all_gather": {
            "gloo": lambda: gloo._allgather_base(whole, small).wait(),
            "shm": lambda: group.all_gather_into_tensor(whole, small),
            "shared": lambda: group.all_gather_into_tensor(whole, shared_part),
        },
        "reduce_scatter": {
            "gloo": lambda: gloo._reduce_scatter_base(small, whole).wait(),
            "shm": lambda: group.reduce_scatter_tensor(small, whole),
            "shared": lambda: group.reduce_scatter_tensor(small, shared),
        },
        "all_to_all": {
            "gloo": lambda: gloo.alltoall_base(other, whole, [], []).wait(),
            "shm": lambda: group.all_to_all_single(other, whole),
            "shared": lambda: group.all_to_all_single(other, shared),
        },
    }
    return {**calls[kind], "memcpy": lambda: other.copy_(whole)}


def run_rank(rank: int, address: str, results: Any, size: int, plan: list[tuple[str, int]], quick: bool) -> None:
    torch.set_num_threads(1)
    store = connect(address)
    native = store.namespace(f"gloo/{size}").as_c10d()
    gloo = dist.ProcessGroupGloo(native, rank, size, timedelta(seconds=60))
    group = Group.create(store, rank, size, backend="auto", timeout=60.0, job=f"bench{size}")
    assert group.backend == "shm", group.backend
    for kind, nbytes in plan:
        ways = contenders(kind, nbytes, gloo, group)
        timings = compare(ways, group.barrier, *rounds_for(nbytes, quick))
        if rank == 0:
            results.put((kind, nbytes, timings))
    group.barrier()
    if rank == 0:
        results.put(None)
    group.close()


def show(size: int, kind: str, nbytes: int, timings: dict[str, Timing]) -> str:
    cells = "".join(f"{timings[name].call * 1e6:>10.0f}" for name in ("gloo", "shm", "shared", "memcpy"))
    gloo, shm, shared = (timings[name] for name in ("gloo", "shm", "shared"))
    ratio, shared_ratio = gloo.call / shm.call, gloo.call / shared.call
    firsts = f"{gloo.first / shm.first:>9.1f}x{gloo.first / shared.first:>9.1f}x"
    notes = ""
    if size == 2 and kind == "all_reduce":
        for what, goals, value in (("", GOALS, ratio), (" shared", SHARED_GOALS, shared_ratio)):
            if nbytes in goals:
                notes += f"  goal{what} {goals[nbytes]:g}x {'met' if value >= goals[nbytes] else 'MISSED'}"
    return f"{size:>5} {kind:<15}{amount(nbytes):>7}{cells}{ratio:>9.1f}x{shared_ratio:>9.1f}x{firsts}{notes}"


def keep(size: int, kind: str, nbytes: int, timings: dict[str, Timing]) -> None:
    case = f"comm/same host/{size}/{kind}/{amount(nbytes)}"
    for name in ("shm", "shared"):
        record(f"{case}/{name}", "us", timings[name].call * 1e6, timings["gloo"].call * 1e6)
        record(f"{case}/{name}, first call", "us", timings[name].first * 1e6, timings["gloo"].first * 1e6)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="which collectives")
    parser.add_argument("--up-to", type=int, default=128, metavar="MB", help="no larger sizes")
    options = parser.parse_args(arguments)
    plan = [
        (kind, nbytes)
        for kind in options.kinds
        for nbytes in (SIZES if kind == "all_reduce" else OTHER_SIZES)
        if nbytes <= min(options.up_to, 32 if options.quick and kind != "all_reduce" else 128) * MB
    ]
    print("medians in microseconds per call; ratios are gloo / shm and gloo / shm on shared tensors, of calls in a")
    print("loop, and of the first call after something else")
    columns = "".join(f"{name:>10}" for name in ("gloo", "shm", "shared", "memcpy"))
    print(f"ranks {'collective':<15}{'bytes':>7}{columns}{'shm':>10}{'shared':>10}{'1st shm':>10}{'1st shrd':>10}")
    for size in options.ranks:
        with disturbance_told():
            for item in on_ranks(size, run_rank, size, plan, options.quick):
                print(show(size, *item), flush=True)
                keep(size, *item)


if __name__ == "__main__":
    main()
