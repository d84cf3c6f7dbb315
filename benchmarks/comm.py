"""What Group costs over the bare c10d call, and how long survivors need from a kill to their next collective.

Overhead: on torch's fake backend, so that no network hides it; both sides interleaved call by call, medians.
Recovery: real processes, SIGKILL to one of them, until the survivors get ``PeerLost``, and until the first collective
of the next generation has finished on all of them; for gloo and for shared memory.
Same host: gloo, shared memory, shared memory on shared buffers and one memcpy, interleaved (``_same_host``); and plain
torch programs on the ``phalanx`` backend (``_as_backend``).

    python -m benchmarks.comm [--faults]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import FakeProcessGroup

from benchmarks import _as_backend, _same_host
from benchmarks._results import record
from phalanx.comm import Group, observe
from phalanx.comm.stores import TCPStore, connect
from phalanx.errors import PeerLost

PAUSE = 0.005
"""Seconds between two collectives of ranks that are mostly elsewhere; it counts towards what they need to notice."""


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each call, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def overhead(rounds: int) -> None:
    """Against torch's fake backend, which does nothing: what is left is the cost of the calls themselves."""
    bare = FakeProcessGroup._create_internal(0, 4)
    group = Group.wrap(bare)
    small = torch.ones(1024)
    large = torch.ones(4096)
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (lambda: bare.allreduce([small]).wait(), lambda: group.all_reduce(small)),
        "broadcast": (lambda: bare.broadcast(small, 0).wait(), lambda: group.broadcast(small, 0)),
        "all_gather_into_tensor": (
            lambda: bare._allgather_base(large, small).wait(),
            lambda: group.all_gather_into_tensor(large, small),
        ),
        "reduce_scatter_tensor": (
            lambda: bare._reduce_scatter_base(small, large).wait(),
            lambda: group.reduce_scatter_tensor(small, large),
        ),
        "barrier": (lambda: bare.barrier().wait(), lambda: group.barrier()),
    }
    print(
        f"{'collective (fake backend)':28s} {'bare us':>9s} {'Group us':>9s} {'added us':>9s} {'watched: added':>18s}"
    )
    for name, (plain, ours) in cases.items():
        for call in (plain, ours):
            for _ in range(50):
                call()

        def watched(call: Callable[[], object] = ours) -> None:
            call()

        with observe(lambda event: None):
            seen = interleaved({"bare": plain, "watched": watched}, rounds)
        result = interleaved({"bare": plain, "ours": ours}, rounds)
        print(
            f"{name:28s} {result['bare']:9.2f} {result['ours']:9.2f} {result['ours'] - result['bare']:9.2f} "
            f"{seen['watched'] - seen['bare']:18.2f}"
        )
        record(f"comm/overhead/{name}", "us", result["ours"], result["bare"])


def _survive(rank: int, size: int, url: str, backend: str, doing: str, pipe: object) -> None:
    """Reduce until a peer is lost, then once more without it."""
    torch.set_num_threads(1)
    store = connect(url)
    group = Group.create(store, rank, size, backend=backend, timeout=60, job="bench", generation=0)
    assert group.backend == ("shm" if backend == "auto" else backend), group.backend
    tensor = torch.ones(1000)
    group.all_reduce(tensor, "max")
    pipe.send("ready")  # type: ignore[attr-defined]  # a Connection
    if doing == "blocked" and rank == size - 1:
        signal.pause()
    try:
        while True:
            if doing == "between":
                time.sleep(PAUSE)
            group.all_reduce(tensor, "max")
    except PeerLost:
        noticed = time.time()
        group.abort()
    survivors = [r for r in range(size) if r != size - 1]
    group = Group.create(
        store, survivors.index(rank), len(survivors), backend=backend, timeout=60, job="bench", generation=1
    )
    group.all_reduce(tensor, "max")
    pipe.send((noticed, time.time()))  # type: ignore[attr-defined]  # a Connection
    group.barrier()
    os._exit(0)


def recovery(size: int, rounds: int, backend: str, doing: str) -> None:
    """Kill the last of ``size`` ranks while the others are busy reducing, blocked in a collective or between two."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "phalanx.comm"])
    noticed, working = [], []
    for _ in range(rounds):
        store = TCPStore.serve()
        pipes, workers = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_survive, args=(rank, size, store.address, backend, doing, theirs), daemon=True
            )
            process.start()
            pipes.append(ours)
            workers.append(process)
        for pipe in pipes:
            pipe.recv()
        time.sleep(0.2)  # long enough for those who wait to take their longest naps
        killed = time.time()
        os.kill(workers[-1].pid or 0, signal.SIGKILL)
        for pipe in pipes[:-1]:
            seen, done = pipe.recv()
            noticed.append((seen - killed) * 1e3)
            working.append((done - killed) * 1e3)
        for process in workers:
            process.join(10)
        store.close()
    carrier = "shm" if backend == "auto" else backend
    for what, values in (("noticed", noticed), ("next group works", working)):
        middle = statistics.median(values)
        record(f"comm/kill/{carrier}/{size}/{doing}/{what}", "ms", middle, low=min(values), high=max(values))
    print(
        f"{carrier:5s} {size} ranks, one killed, others {doing:8s} {rounds} rounds, ms "
        f"from SIGKILL: noticed median {statistics.median(noticed):.1f} max {max(noticed):.1f}; "
        f"next generation's first collective median {statistics.median(working):.1f} max {max(working):.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes of the same-host comparison")
    parser.add_argument("--faults", action="store_true", help="only how long survivors of a kill need")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.faults:
        overhead(options.rounds)
    for size in (3, 5):
        recovery(size, options.kills, "gloo", "busy")
    for size, doing in itertools.product((2, 3, 4), ("busy", "blocked", "between")):
        recovery(size, options.kills, "auto", doing)
    if not options.faults:
        _same_host.main(["--quick"] if options.quick else [])
        _as_backend.main()


if __name__ == "__main__":
    main()
