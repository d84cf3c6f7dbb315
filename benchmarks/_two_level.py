"""Groups over several hosts: two levels against single-level gloo, per collective and size, in one interleaved run.

The hosts are believed ones on this machine: ranks are told different machine names, so shared memory is used inside a
"host" and gloo over loopback between them; a real network was not at hand. ``PAYS_UP_TO`` in
``phalanx.comm.transports._two_level`` rests on this table (see docs/adr/0004-two-levels-by-table.md).

Run: ``python -m benchmarks._two_level``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._results import record
from benchmarks._turns import KB, MB, amount, compare, disturbance_told, on_ranks, rounds_for
from phalanx.comm import Group
from phalanx.comm.failure import _liveness
from phalanx.comm.stores import connect
from phalanx.comm.transports._interface import ReduceOp, Transport
from phalanx.comm.transports._two_level import ANY, TwoLevelTransport

SIZES = [4 * KB, 64 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB]
HOSTS = ["aabb", "aab"]
KINDS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]


def call_on(kind: str, transport: Transport, nbytes: int) -> Callable[[], object]:
    """One collective of ``nbytes`` on the larger side, followed by a meeting where it has none of its own."""
    part = nbytes // 4 // transport.size
    whole, own = torch.ones(part * transport.size), torch.ones(part)
    run: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: transport.all_reduce(whole, ReduceOp.SUM, async_op=False),
        "broadcast": lambda: (
            transport.broadcast(whole, 0, async_op=False),
            transport.barrier(async_op=False),
        ),
        "all_gather": lambda: transport.all_gather_into_tensor(whole, own, async_op=False),
        "reduce_scatter": lambda: transport.reduce_scatter_tensor(own, whole, ReduceOp.SUM, async_op=False),
    }
    return run[kind]


def run_rank(rank: int, address: str, results: Any, hosts: str) -> None:
    torch.set_num_threads(1)
    _liveness._machine = lambda: hosts[rank]
    group = Group.create(connect(address), rank, len(hosts), backend="auto", timeout=60.0, job=f"two{hosts}")
    both = group._transport
    assert isinstance(both, TwoLevelTransport), both.name
    both.pays_up_to = dict.fromkeys(KINDS, ANY)
    for kind in KINDS:
        for nbytes in SIZES:
            rounds, calls = rounds_for(nbytes, quick=False)
            ways = {"flat": call_on(kind, both._flat, nbytes), "two": call_on(kind, both, nbytes)}
            timings = compare(ways, lambda: both._flat.barrier(async_op=False), rounds, min(calls, 20))
            if rank == 0:
                results.put((kind, nbytes, timings["flat"].call, timings["two"].call))
    both._flat.barrier(async_op=False)
    if rank == 0:
        results.put(None)
    group.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", nargs="*", default=HOSTS, help="one letter per rank: its host")
    options = parser.parse_args(arguments)
    print("medians in microseconds per call; ratio is single level / two levels")
    print(f"{'hosts':<6} {'collective':<15}{'bytes':>8}{'gloo':>10}{'two levels':>12}{'ratio':>8}")
    for hosts in options.hosts:
        with disturbance_told():
            for kind, nbytes, flat, two in on_ranks(len(hosts), run_rank, hosts):
                row = f"{amount(nbytes):>8}{flat * 1e6:>10.0f}{two * 1e6:>12.0f}"
                print(f"{hosts:<6} {kind:<15}{row}{flat / two:>7.1f}x", flush=True)
                record(f"two_level/{hosts}/{kind}/{amount(nbytes)}", "us", two * 1e6, flat * 1e6)


if __name__ == "__main__":
    main()
