"""Same-host transport against gloo: time per collective and size, in one interleaved run.

For 2 and 4 ranks, each round times gloo, shared memory, shared memory on shared tensors and one memcpy of the same
bytes in turns (``_turns``); medians are printed, and the ratio gloo / ours. Bytes are those of the larger side of the
collective.

Run: ``python -m benchmarks._same_host [--quick]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._turns import KB, MB, amount, compare, on_ranks, rounds_for
from phalanx.comm import Group
from phalanx.comm.stores import connect

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


def run_rank(rank: int, address: str, results: Any, size: int, quick: bool) -> None:
    torch.set_num_threads(1)
    store = connect(address)
    native = store.namespace(f"gloo/{size}").as_c10d()
    gloo = dist.ProcessGroupGloo(native, rank, size, timedelta(seconds=60))
    group = Group.create(store, rank, size, backend="auto", timeout=60.0, job=f"bench{size}")
    assert group.backend == "shm", group.backend
    plan = [("all_reduce", s) for s in SIZES]
    plan += [
        (kind, s) for kind in ("broadcast", "all_gather", "reduce_scatter", "all_to_all") for s in OTHER_SIZES
    ]
    for kind, nbytes in plan:
        if quick and nbytes > 32 * MB and kind != "all_reduce":
            continue
        ways = contenders(kind, nbytes, gloo, group)
        medians = compare(ways, group.barrier, *rounds_for(nbytes, quick))
        if rank == 0:
            results.put((kind, nbytes, medians))
    group.barrier()
    if rank == 0:
        results.put(None)
    group.close()


def show(size: int, kind: str, nbytes: int, medians: dict[str, float]) -> str:
    cells = "".join(f"{medians[name] * 1e6:>12.0f}" for name in ("gloo", "shm", "shared", "memcpy"))
    ratio, shared_ratio = medians["gloo"] / medians["shm"], medians["gloo"] / medians["shared"]
    notes = ""
    if size == 2 and kind == "all_reduce":
        for what, goals, value in (("", GOALS, ratio), (" shared", SHARED_GOALS, shared_ratio)):
            if nbytes in goals:
                notes += f"  goal{what} {goals[nbytes]:g}x {'met' if value >= goals[nbytes] else 'MISSED'}"
    return f"{size:>5} {kind:<15}{amount(nbytes):>7}{cells}{ratio:>9.1f}x{shared_ratio:>9.1f}x{notes}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args(arguments)
    print("medians in microseconds per call; ratios are gloo / shm and gloo / shm on shared tensors")
    columns = "".join(f"{name:>12}" for name in ("gloo", "shm", "shared", "memcpy"))
    print(f"ranks {'collective':<15}{'bytes':>7}{columns}{'shm':>10}{'shared':>10}")
    for size in options.ranks:
        for item in on_ranks(size, run_rank, size, options.quick):
            print(show(size, *item), flush=True)


if __name__ == "__main__":
    main()
