"""Says what on this machine would keep a job from running, in plain words: ``phalanx doctor``.

Owns the list of checks. Each is a function that returns findings and never raises for what it is looking for; a
finding says what was seen and, when something is wrong, what to do. Exit code 1 when anything is bad.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.launch.cli._finding import Finding, closing_words, worst_of

SLOW_LOOKUP = 0.5
MIN_SHARED_MEMORY = 1 << 30
MIN_FILES = 1024
ENDPOINT_PATIENCE = 10.0


def main(argv: Sequence[str]) -> int:
    """Run ``phalanx doctor`` with these arguments; the exit code."""
    parser = doctor_parser()
    args = parser.parse_args(argv)
    if args.peers or args.listen is not None:
        return _check_paths(parser, args)
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_python, check_torch, check_kernel, check_ports, check_names, check_shared_memory, check_transport,
        check_files, check_numa,
    ]  # fmt: skip
    if not args.quick:
        checks.append(check_two_workers)
    if args.rdzv_endpoint:
        checks.append(lambda: check_endpoint(args.rdzv_backend, args.rdzv_endpoint))
    found: list[Finding] = []
    for check in checks:
        for finding in check():
            found.append(finding)
            if not args.json:
                print(finding, flush=True)
    worst = worst_of(found)
    if args.json:
        rows = [{"level": finding.level, "text": finding.text} for finding in found]
        print(json.dumps({"worst": worst, "findings": rows}))
    else:
        print(closing_words(worst))
    return 1 if worst == "bad" else 0


def _check_paths(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from phalanx.launch.cli import _doctor_peers  # start-up speed: seldom needed

    for peer in [*args.peers, *([args.listen] if args.listen else [])]:
        try:
            _doctor_peers.split_peer(peer, _doctor_peers.DEFAULT_PORT, default_host="127.0.0.1")
        except ValueError as error:
            parser.error(str(error))
    return _doctor_peers.run(args.peers, args.listen, args.seconds, as_json=args.json)


def doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="phalanx doctor", description="Check this machine.")
    parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint", default="", help="also try to reach this endpoint")
    parser.add_argument("--rdzv-backend", "--rdzv_backend", default="c10d", choices=("c10d", "static", "etcd", "file"))
    parser.add_argument("--quick", action="store_true", help="leave out the trial run of two workers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="HOST",
        help="only measure the paths to these machines (HOST, HOST:PORT or [IPv6]:PORT), which run doctor --listen",
    )
    parser.add_argument(
        "--listen",
        nargs="?",
        const="",
        metavar="[HOST:]PORT",
        help="answer the --peers of other machines; by default at 127.0.0.1 port 29398, 0.0.0.0 for all interfaces",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long --listen answers, and waits for peers to come up"
    )
    return parser


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", f"Python {version} on {sys.platform}, {_cpus()} usable CPUs")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_torch() -> Iterator[Finding]:
    """Ask about torch in another process: an import that crashes must not take the doctor with it."""
    question = (
        "import torch, torch.distributed as d\n"
        "names = [n for n in ('gloo', 'nccl', 'mpi', 'ucc') if getattr(d, f'is_{n}_available')()]\n"
        "from phalanx._devices import describe\n"
        "import json; print(torch.__version__, ','.join(names) or '-', json.dumps(describe()))\n"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("bad", f"torch cannot be imported: {last}. Install torch into {sys.prefix}")
        return
    version, names, seen = answer.stdout.strip().splitlines()[-1].split(" ", 2)
    device = json.loads(seen)
    if "gloo" not in names:
        yield Finding("bad", f"torch {version} was built without gloo (it has {names}); install an official build")
    else:
        yield Finding("ok", f"torch {version}, backends {names}, {_accelerators(device)}")
    if device["count"] and device["engine"] not in names.split(","):
        missing = f"no {device['engine']}" if device["engine"] else "no backend for them"
        yield Finding(
            "warn",
            f"{device['count']} {device['kind']} device(s) but {missing}: what workers exchange goes through the "
            "host's memory, which is slower",
        )


def _accelerators(seen: dict[str, Any]) -> str:
    """Say what ``phalanx._devices.describe`` saw.

    >>> _accelerators({"kind": "cuda", "count": 2, "name": "X", "free": 3 << 30, "total": 4 << 30})
    '2 cuda device(s) (X, 3.0 of 4.0 GB free)'
    """
    if not seen["count"]:
        return "no accelerator"
    room = f", {seen['free'] / 2**30:.1f} of {seen['total'] / 2**30:.1f} GB free" if seen["total"] else ""
    return f"{seen['count']} {seen['kind']} device(s) ({seen['name']}{room})"


def check_kernel() -> Iterator[Finding]:
    missing = [name for name in ("pidfd_open", "memfd_create", "sched_setaffinity") if not hasattr(os, name)]
    if missing:
        yield Finding("warn", f"this system lacks {', '.join(missing)}: exits are noticed later, no CPU binding")
    else:
        yield Finding("ok", "the kernel offers process descriptors, anonymous files and CPU binding")


def check_ports() -> Iterator[Finding]:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5),
        ):
            pass
    except OSError as error:
        yield Finding("bad", f"a connection to 127.0.0.1 fails: {error}. Is the loopback interface up? (ip link)")
        return
    yield Finding("ok", "connections over loopback work")
    for port in (29400, 29500):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            yield Finding("warn", f"port {port}, a default of multi-node jobs, is in use; give another one")


def check_names() -> Iterator[Finding]:
    name = socket.gethostname()
    started = time.monotonic()
    try:
        found = socket.getaddrinfo(name, None)
    except OSError as error:
        yield Finding(
            "bad", f"this machine's own name {name!r} cannot be resolved: {error}. Add it to /etc/hosts, or set "
            "GLOO_SOCKET_IFNAME and --local-addr",
        )  # fmt: skip
        return
    seconds = time.monotonic() - started
    level = "ok" if seconds < SLOW_LOOKUP else "warn"
    yield Finding(level, f"the name {name!r} is {found[0][4][0]} (looked up in {seconds * 1e3:.0f} ms)")
    slowest = max(_time_reverse_lookup() for _ in range(5))
    if slowest >= SLOW_LOOKUP:
        yield Finding(
            "warn", f"asking for the name of 127.0.0.1 took {slowest:.1f} s: torch does that for every connection, and "
            "starts will be slow now and then. Add '::ffff:127.0.0.1 localhost' to /etc/hosts or mend the name server",
        )  # fmt: skip
    else:
        yield Finding("ok", f"reverse lookups take {slowest * 1e3:.0f} ms")


def _time_reverse_lookup() -> float:
    started = time.monotonic()
    try:
        socket.getnameinfo(("::ffff:127.0.0.1", 80, 0, 0), 0)
    except OSError:
        pass
    return time.monotonic() - started


def check_shared_memory() -> Iterator[Finding]:
    """Look at ``/dev/shm``, which is for torch's own multiprocessing; our own transport uses memfds, see
    ``check_transport``."""
    path = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    free = shutil.disk_usage(path).free
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix="phalanx-doctor-") as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        yield Finding(
            "bad", f"{path} cannot be written: {error}. torch's data loader processes hand their batches over in it; "
            "what workers of one machine exchange does not need it (anonymous memory)",
        )  # fmt: skip
        return
    if free < MIN_SHARED_MEMORY:
        yield Finding(
            "warn",
            f"only {free >> 20} MB free in {path}: data loader processes with large batches may need more (containers: "
            "--shm-size=8g); what workers of one machine exchange does not count against it (anonymous memory)",
        )
    else:
        yield Finding("ok", f"{free >> 20} MB free in {path} for torch's data loader processes")


def check_transport() -> Iterator[Finding]:
    """Return what would carry CPU tensors between two workers of this machine; asked in another process, as torch
    is."""
    question = "from phalanx.comm.transports._auto import foresee; choice = foresee(); print(choice.kind, choice.why)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("bad", f"cannot tell how workers here would exchange tensors: {last}")
        return
    kind, _, why = answer.stdout.strip().partition(" ")
    advice = "" if kind == "shm" else "; workers of this machine will use loopback TCP, which is several times slower"
    yield Finding("ok" if kind == "shm" else "warn", f"transport between workers here: {kind}, since {why}{advice}")


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        yield Finding("warn", f"at most {soft} open files (hard limit {hard}); raise it with ulimit -n {MIN_FILES}")
    else:
        yield Finding("ok", f"open files: up to {soft}")


def check_numa() -> Iterator[Finding]:
    from phalanx.launch.numa import NumaError, read_topology  # start-up speed

    try:
        allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
        nodes = read_topology(Path("/sys"), allowed, os.environ).nodes
    except NumaError as error:
        yield Finding("warn", f"--numa-binding is not possible here: {error}")
        return
    sizes = ", ".join(f"node {number}: {len(cpus)} CPUs" for number, cpus in sorted(nodes.items()))
    yield Finding("ok", f"NUMA: {sizes}")


TRIAL = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
assert x.item() == 3.0, x
dist.destroy_process_group()
"""


def check_two_workers() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="phalanx-doctor-") as directory:
        script = os.path.join(directory, "trial.py")
        with open(script, "w") as file:
            file.write(TRIAL)
        command = [sys.executable, "-m", "phalanx", "run", "--standalone", "--nproc-per-node", "2", script]
        started = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            yield Finding("bad", "two workers did not finish an all-reduce in 120 s; is a firewall on loopback?")
            return
    if done.returncode:
        shown = "\n        ".join(done.stderr.strip().splitlines()[-12:])
        yield Finding("bad", f"two workers could not add two numbers:\n        {shown}")
    else:
        yield Finding("ok", f"two workers started and all-reduced in {time.monotonic() - started:.1f} s")


def check_endpoint(backend: str, endpoint: str) -> Iterator[Finding]:
    from phalanx.comm.stores import connect  # start-up speed: it imports torch
    from phalanx.errors import StoreError
    from phalanx.launch.cli._jobs import store_url
    from phalanx.protocol import UNUSED

    try:
        url = store_url(backend, endpoint)
        store = connect(url, timeout=ENDPOINT_PATIENCE)
        store.get(UNUSED)
        store.close()
    except (StoreError, ValueError, OSError) as error:
        yield Finding(
            "bad", f"the rendezvous endpoint {endpoint} cannot be reached: {error}. For c10d and static, an agent must "
            "be running on that machine; is the port open in its firewall?",
        )  # fmt: skip
        return
    yield Finding("ok", f"the rendezvous endpoint {url} answers")
