"""How long N nodes take to agree on a generation: ours and torch's, side by side, all nodes in one process.

Every node is a thread with its own handler. Connections are made before the clock starts, for both; it stops
when the last node has its rank. Ours and torch's runs alternate. Nodes of ours that share a process parse a
generation's record once, as they would in parallel on their own machines; all other work is done by each.
``python -m benchmarks.rendezvous [--nodes 64 1000]``
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Torch's store client looks up the name of every peer; a name server that drops requests would cost 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from benchmarks._results import record
from phalanx.comm.stores import MemoryStore
from phalanx.launch.rendezvous import RendezvousHandler, RendezvousParameters, get_rendezvous_handler
from phalanx.launch.rendezvous._backends import OpenStore, make_handler

TORCH_LIMIT = 200
"""More nodes than this would keep torch's busy for many minutes; its time is then extrapolated and marked so."""


def our_tcp_handlers(count: int) -> list[RendezvousHandler]:
    first = get_rendezvous_handler(_parameters("localhost:0", count))
    endpoint = first.store_url.removeprefix("tcp://")
    return [first, *(get_rendezvous_handler(_parameters(endpoint, count)) for _ in range(count - 1))]


def our_memory_handlers(count: int) -> list[RendezvousHandler]:
    root = MemoryStore()
    return [
        make_handler(_parameters("", count), OpenStore(store=root.clone(), url="memory://"), loopback=True)
        for _ in range(count)
    ]


def _parameters(endpoint: str, count: int) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, "bench", count, count, join_timeout=300, lease=120)


def torch_handlers(count: int) -> list[object]:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousTimeout,
    )

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    server = TCPStore("localhost", 0, None, True, wait_for_workers=False)
    handlers: list[object] = []
    for index in range(count):
        store = server if index == 0 else TCPStore("localhost", server.port, None, False, wait_for_workers=False)
        backend = C10dRendezvousBackend(store, "bench")
        handlers.append(
            DynamicRendezvousHandler.from_backend("bench", store, backend, count, count, timeout=RendezvousTimeout())
        )
    return handlers


def meet(handlers: Sequence[RendezvousHandler | object]) -> float:
    """Seconds from the moment that all threads are ready until the last has its rank; checks the ranks."""
    seconds, ranks = meet_others(handlers)
    if sorted(ranks) != list(range(len(handlers))):
        raise AssertionError(f"{len(handlers)} nodes got the ranks {sorted(ranks)}")
    return seconds


def meet_others(handlers: Sequence[RendezvousHandler | object]) -> tuple[float, list[int]]:
    """As ``meet``, of nodes that are not all: their ranks, too."""
    ranks: list[int] = []
    gate = threading.Barrier(len(handlers) + 1)

    def node(handler: RendezvousHandler) -> None:
        gate.wait()
        ranks.append(handler.next_rendezvous().rank)

    threads = [threading.Thread(target=node, args=(handler,)) for handler in handlers]
    for thread in threads:
        thread.start()
    gate.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started, ranks


def end_ours(handlers: Sequence[RendezvousHandler]) -> None:
    handlers[0].set_closed()
    threads = [threading.Thread(target=handler.shutdown) for handler in reversed(handlers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_ours(make: Callable[[int], list[RendezvousHandler]], count: int) -> float:
    handlers = make(count)
    try:
        return meet(handlers)
    finally:
        end_ours(handlers)
        gc.collect()


def measure_torch(count: int) -> float:
    handlers = torch_handlers(count)
    try:
        return meet(handlers)
    finally:
        for handler in handlers:
            handler._stop_heartbeats()  # type: ignore[attr-defined]  # it has no public way to leave quietly
        del handlers
        gc.collect()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    torch_per_node = 0.0
    for count in options.nodes:
        ours_tcp, ours_memory, torchs = [], [], []
        for _ in range(options.repeat if count <= TORCH_LIMIT else 1):
            ours_memory.append(measure_ours(our_memory_handlers, count))
            if count <= TORCH_LIMIT:
                ours_tcp.append(measure_ours(our_tcp_handlers, count))
                torchs.append(measure_torch(count))
        print(f"{count} nodes")
        print(f"  ours, memory store  {_spread(ours_memory)}")
        middle = statistics.median(ours_memory)
        record(f"rendezvous/memory/{count}", "s", middle, low=min(ours_memory), high=max(ours_memory))
        if torchs:
            torch_per_node = statistics.median(torchs) / count
            ratio = statistics.median(ours_tcp) / statistics.median(torchs)
            print(f"  ours, TCP store     {_spread(ours_tcp)}   {ratio:.3f}x of torch's")
            print(f"  torch, TCP store    {_spread(torchs)}")
            record(f"rendezvous/tcp/{count}", "s", statistics.median(ours_tcp), statistics.median(torchs))
        elif torch_per_node:
            guess = torch_per_node * count
            print(f"  torch, TCP store    not run; at its time per node above it would take {guess:.0f} s")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):8.3f} s   ({min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} runs)"


if __name__ == "__main__":
    main()
