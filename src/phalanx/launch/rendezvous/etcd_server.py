"""Starts an etcd server beside a job on one machine: for tries and tests, as torch's ``EtcdServer``."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from typing import IO

from phalanx.comm import stores
from phalanx.comm.stores._interface import Store
from phalanx.errors import StoreError
from phalanx.launch.rendezvous._etcd_process import ENV_BINARY, find_program

__all__ = ["EtcdServer"]

log = logging.getLogger(__name__)


class EtcdServer:
    """An etcd of one machine, on free ports of loopback; its program is ``TORCHELASTIC_ETCD_BINARY_PATH``, that of the
    extra ``etcd``, or ``etcd`` on the path. It ends with this process, if ``stop`` was forgotten."""

    def __init__(self, data_dir: str | None = None) -> None:
        self._program = os.environ.get(ENV_BINARY) or find_program() or "etcd"
        self._data_dir = data_dir or tempfile.mkdtemp(prefix="phalanx_etcd_")
        self._process: subprocess.Popen[bytes] | None = None
        self._port = -1

    def get_host(self) -> str:
        """Return where it listens."""
        return "localhost"

    def get_port(self) -> int:
        """Return the port that it listens at."""
        return self._port

    def get_endpoint(self) -> str:
        """Return ``host:port``, as ``--rdzv-endpoint`` takes it."""
        return f"{self.get_host()}:{self._port}"

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | IO[bytes] | None = None) -> None:
        """Start it, and wait until it answers; ``TimeoutError`` when it does not within ``timeout`` seconds, each of
        ``num_retries`` times."""
        for attempt in range(max(1, num_retries)):
            try:
                self._start(os.path.join(self._data_dir, str(attempt)), stderr)
                self.get_client(timeout).close()
            except StoreError as error:
                log.warning("etcd does not answer at %s: %s", self.get_endpoint(), error)
                self._end()
                continue
            atexit.register(self.stop)
            return
        self.stop()
        raise TimeoutError(f"{self._program} did not answer within {timeout} s, tried {num_retries} times")

    def get_client(self, timeout: float = 60.0) -> Store:
        """Return a store on it."""
        return stores.connect(f"etcd://127.0.0.1:{self._port}", timeout)

    def stop(self) -> None:
        """End it and remove its data."""
        atexit.unregister(self.stop)
        self._end()
        shutil.rmtree(self._data_dir, ignore_errors=True)

    def _start(self, data_dir: str, stderr: int | IO[bytes] | None) -> None:
        with socket.socket() as client, socket.socket() as peer:
            for sock in (client, peer):
                sock.bind(("127.0.0.1", 0))
            self._port, peer_port = int(client.getsockname()[1]), int(peer.getsockname()[1])
        at, peers = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{peer_port}"
        options = {
            "data-dir": data_dir,
            "listen-client-urls": at,
            "advertise-client-urls": at,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        command = [self._program, *(f"--{name}={value}" for name, value in options.items())]
        self._process = subprocess.Popen(command, stderr=stderr)

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
