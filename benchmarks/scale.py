"""What many clients ask of one store: a rendezvous of N, a regroup of 4 to 128 workers, a model of it to 10,000.

Requests and bytes are counted, so they do not depend on the machine; times are of clients that are threads of a few
processes on one machine, and mean little beyond what they are. The model (``_scale_model``) takes the
processor time of a real server for a request, and of gloo for a connection, as measured here.

    python -m benchmarks.scale [--clients 64 1000] [--workers 4 16 64 128] [--model 16 128 1024 10000]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # see benchmarks.rendezvous

import torch.distributed as dist

from benchmarks._results import record
from benchmarks._scale_model import Costs, Simulated
from benchmarks._simulated_regroup import WAYS, SimulatedJob
from phalanx.comm.stores import MemoryStore, connect
from phalanx.comm.stores._for_torch import exchange_for_torch
from phalanx.comm.stores._tcp import TCPStore
from phalanx.launch.rendezvous.etcd_server import EtcdServer

MAX_ON_A_HOST = 128
SERVER = """
import sys
from phalanx.comm.stores import TCPStore
with TCPStore.serve() as store:
    print(store.address, flush=True)
    sys.stdin.read()
"""


class Server:
    """A TCP store in a process of its own, whose processor time can be read."""

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_server(seconds: float) -> tuple[float, float, float]:
    """Seconds of the server's processor for a request and for one more key of it, and of the client's for a request."""
    with Server() as server, connect(server.url) as store:
        assert isinstance(store, TCPStore)
        link = store._link
        keys = [f"v/key{number}" for number in range(1000)]
        for key in keys:
            link.native.set(key, b"1")

        def per_call(call: Callable[[], object]) -> tuple[float, float]:
            before, own, count = server.processor_seconds(), time.process_time(), 0
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                call()
                count += 1
            return (server.processor_seconds() - before) / count, (time.process_time() - own) / count

        one, client = per_call(lambda: link.read(keys[0]))
        many, _ = per_call(lambda: link.native.check(keys))
        return one, max(0.0, many - one) / len(keys), client


def measure_connect(size: int) -> float:
    """Processor seconds of gloo for one end of one connection, while ``size`` ranks connect to each other."""
    root = MemoryStore()
    made: list[object] = [None] * size

    def main(rank: int) -> None:
        store = exchange_for_torch(root.clone().as_c10d(), rank, size, 60.0)
        store.set_timeout(timedelta(seconds=60))
        made[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    before = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.process_time() - before) / (size * (size - 1))


def rendezvous(url: str, count: int, at_once: int) -> tuple[float, list[tuple[int, int]]]:
    """Seconds until all of ``count`` nodes have their ranks, and the requests and bytes of each until then; ``at_once``
    of them are threads of one process."""
    parts = [range(first, min(count, first + at_once)) for first in range(0, count, at_once)]
    module = [sys.executable, "-W", "ignore", "-m", "benchmarks._nodes_of_a_process", url, f"scale-{count}"]
    processes = [
        subprocess.Popen([*module, str(part.start), str(len(part)), str(count)], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for part in parts
    ]  # fmt: skip

    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"a process of the rendezvous ended with {process.wait(60)}"
        return line

    def go_on() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        for process in processes:
            assert read(process) == "ready\n"
        go_on()
        told = [json.loads(read(process)) for process in processes]
        go_on()
        for process in processes:
            process.wait(300)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert sorted(rank for _, ranks, _ in told for rank in ranks) == list(range(count)), "each rank once"
    return max(seconds for seconds, _, _ in told), [tuple(one) for _, _, nodes in told for one in nodes]


def show_rendezvous(name: str, url: str, count: int, at_once: int, server: Server | None = None) -> None:
    before = server.processor_seconds() if server else 0.0
    seconds, requests = rendezvous(url, count, at_once)
    busy = f", {server.processor_seconds() - before:.2f} s of the server's processor" if server else ""
    calls = sum(total for total, _ in requests) / count
    num_bytes = sum(size for _, size in requests) / count
    most = max(total for total, _ in requests)
    print(
        f"rendezvous of {count} on {name}: {calls:.1f} requests (at most {most}) and {num_bytes:,.0f} bytes each, "
        f"{seconds:.2f} s{busy}",
        flush=True,
    )
    record(f"scale/rendezvous/{name}/{count}/requests", "requests", calls, high=most)
    record(f"scale/rendezvous/{name}/{count}/bytes", "bytes", num_bytes)
    note = f"threads of {-(-count // at_once)} processes"
    record(f"scale/rendezvous/{name}/{count}/time", "s", seconds, note=note)


def show_regroups(sizes: Sequence[int]) -> None:
    for way in WAYS:
        for size in sizes:
            counted = SimulatedJob(size, patient=True).run(way)
            timed = SimulatedJob(size, patient=False).run(way)
            first, *others = counted.requests
            calls, num_bytes = (max(getattr(one, what) for one in others) for what in ("total", "num_bytes"))
            print(
                f"regroup of {size}, {way}: {calls} requests of each, {first.total} of the first; {num_bytes:,} and "
                f"{first.num_bytes:,} bytes; {timed.seconds:.3f} s"
            )
            record(f"scale/regroup/{way}/{size}/requests", "requests", calls, high=first.total)
            record(f"scale/regroup/{way}/{size}/bytes", "bytes", num_bytes, high=first.num_bytes)
            record(f"scale/regroup/{way}/{size}/time", "s", timed.seconds, note="threads of one process")


def show_model(sizes: Sequence[int], seconds: float) -> None:
    request, key, client = measure_server(seconds)
    connecting = measure_connect(16)
    costs = Costs(request=request, key=key, client=client, connect=connecting)
    print(
        f"a request: {request * 1e6:.1f} us of the server, {client * 1e6:.1f} us of its client; a key more "
        f"{key * 1e6:.2f} us"
    )
    print(f"an end of a connection of gloo: {connecting * 1e6:.0f} us")
    for name, value in (("request", request), ("key", key), ("client", client), ("connect", connecting)):
        record(f"scale/cost/{name}", "us", value * 1e6)
    for name in ("gloo", "shm"):
        for size in sizes if name == "gloo" else [size for size in sizes if size <= MAX_ON_A_HOST]:
            simulated = Simulated(size, costs, transport=name)
            took = simulated.run()
            requests = simulated.num_requests / size
            print(
                f"model, {size} workers, {name}: {took:.3f} s, {requests:.1f} requests each, "
                f"{simulated.num_bytes / 1e6:,.0f} MB"
            )
            record(f"scale/model/{name}/{size}", "s", took, note=f"{simulated.num_bytes / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[64, 1000], help="of a TCP store")
    parser.add_argument("--etcd-clients", type=int, nargs="*", default=[64])
    parser.add_argument("--at-once", type=int, default=125, help="clients that are threads of one process")
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 16, 64, 128])
    parser.add_argument("--model", type=int, nargs="*", default=[16, 128, 1024, 10000])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cost that is measured")
    options = parser.parse_args()
    logging.getLogger("phalanx").setLevel(logging.ERROR)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"cores {os.cpu_count()}, load before {os.getloadavg()[0]:.1f}")
    show_regroups(options.workers)
    show_model(options.model, options.seconds)
    for count in options.clients:
        with Server() as server:
            show_rendezvous("tcp", server.url, count, options.at_once, server)
    if options.etcd_clients:
        etcd = EtcdServer()
        etcd.start(stderr=subprocess.DEVNULL)
        try:
            with closing(etcd.get_client()):
                for count in options.etcd_clients:
                    show_rendezvous("etcd", f"etcd://{etcd.get_endpoint()}", count, options.at_once)
        finally:
            etcd.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(f"load after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
