"""Hosts in a box: several machines of a test as namespaces of this one, joined by a switch that can be hurt.

A host is a network, a pid, a uts and a mount namespace, with a host name, an IPv4 and an IPv6 address, and a first
process with which all others of the host end. The switch is a bridge in a network namespace of its own: nothing of the
box can be reached from this machine, so two boxes may have the same addresses. With ``split_workers`` a host has a
second network namespace at the same switch, for processes that enter it: so the paths of agents and those of workers
can be cut apart.

Faults, each a call: ``link_down``/``link_up`` (the host sees it), ``silence``/``restore`` (both ends seem fine and
nothing arrives), ``cut``/``mend`` between two places (silent, one way if wanted), ``shape`` (delay, loss, bandwidth),
``power_off`` (silent, then every process is gone) and ``power_on``.

Everything is removed when the ``with`` block is left, whatever happened in it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.networks import NOBODY, ip, run

INIT = """
import os, signal, socket, subprocess, sys
name, hosts, ready = sys.argv[1:]
socket.sethostname(name)
subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
subprocess.run(["mount", "--bind", "/dev/null", "/etc/resolv.conf"], check=True)  # no name server: answered at once
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is left to it is reaped at once
os.write(os.open(ready, os.O_WRONLY), b"ready")
while True:
    signal.pause()
"""
"""The first process of a host."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One end at the switch: a network namespace, the device in it, the switch's port for it, and its addresses."""

    namespace: str
    device: str
    port: str
    address: str
    address6: str

    @property
    def path(self) -> str:
        """The namespace as a file, for ``setns``."""
        return f"/run/netns/{self.namespace}"


@dataclass(kw_only=True)
class Host:
    """A machine. ``workers`` is where workers are: the host itself, unless they have a place of their own."""

    name: str
    main: Place
    workers: Place
    switch: str
    hosts_file: Path
    _first: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _pid: int = 0

    @property
    def address(self) -> str:
        return self.main.address

    @property
    def places(self) -> tuple[Place, ...]:
        return (self.main,) if self.main is self.workers else (self.main, self.workers)

    @property
    def is_on(self) -> bool:
        return self._first is not None

    def inside(self, *command: str, directory: str | None = None) -> list[str]:
        """The command, run on the host, in ``directory``. A process that has it as its prefix ends with the host."""
        assert self._first is not None, f"{self.name} is off"
        enter = ["nsenter", f"--target={self._pid}", "--net", "--pid", "--uts", "--mount", "--"]
        return [*enter, "env", f"--chdir={directory or os.getcwd()}", *command]

    def call(self, *command: str, timeout: float = 90.0) -> str:
        """What the command prints on the host; it must succeed."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr.strip()}"
        return done.stdout

    # -- faults -----------------------------------------------------------------------------------------------

    def link_down(self) -> None:
        """Pull the cable: the host sees that it has no carrier."""
        for place in self.places:
            run("-n", self.switch, "link", "set", place.port, "down")

    def link_up(self) -> None:
        for place in self.places:
            run("-n", self.switch, "link", "set", place.port, "up")

    def silence(self) -> None:
        """Take the host off the switch without a word: it goes on sending, and nothing arrives either way."""
        for place in self.places:
            run("-n", self.switch, "link", "set", place.port, "nomaster")

    def restore(self) -> None:
        for place in self.places:
            run("-n", self.switch, "link", "set", place.port, "master", "switch")

    def shape(self, *, delay: str = "", loss: str = "", rate: str = "") -> None:
        """Make the host's links slow or lossy, in tc's words (``20ms``, ``1%``, ``100mbit``), both ways."""
        kind = ["netem", *(["delay", delay] if delay else []), *(["loss", loss] if loss else [])]
        if rate:
            kind = (
                [*kind, "rate", rate] if delay or loss else ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
            )
        for place in self.places:
            for namespace, device in ((place.namespace, place.device), (self.switch, place.port)):
                tc("-n", namespace, "qdisc", "replace", "dev", device, "root", *kind)

    def unshape(self) -> None:
        for place in self.places:
            for namespace, device in ((place.namespace, place.device), (self.switch, place.port)):
                tc("-n", namespace, "qdisc", "del", "dev", device, "root")

    def power_off(self) -> None:
        """End all at once, as by the plug: no process of it, and no kernel for it, says goodbye to anybody."""
        self.silence()
        self.stop()

    def power_on(self) -> None:
        """Start it again, with nothing of before running on it."""
        self.restore()
        self.start()

    # -- its first process ------------------------------------------------------------------------------------

    def start(self) -> None:
        read, write = os.pipe()
        command = ["nsenter", f"--net={self.main.path}", "unshare", "--pid", "--uts", "--mount", "--fork",
                   "--mount-proc", "--kill-child", sys.executable, "-S", "-c", INIT,
                   self.name, str(self.hosts_file), f"/dev/fd/{write}"]  # fmt: skip
        self._first = subprocess.Popen(command, pass_fds=[write], stderr=subprocess.PIPE)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            if told.read(5) != b"ready":
                self._first.kill()
                assert self._first.stderr is not None, "it was asked for"
                error = self._first.stderr.read().decode().strip()
                self.stop()
                pytest.skip(f"no namespaces for processes here: {error}; they need root, or CAP_SYS_ADMIN")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        assert len(children) == 1, f"{self.name} has {len(children)} first processes"
        self._pid = int(children[0])

    def stop(self) -> None:
        """End the first process, and with it all others: the kernel does that."""
        if self._first is None:
            return
        if self._pid:
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
        self._first.wait(60)
        assert self._first.stderr is not None, "it was asked for"
        self._first.stderr.close()
        self._first, self._pid = None, 0


@dataclass(frozen=True)
class Box:
    """All hosts and what is between them."""

    hosts: tuple[Host, ...]

    def cut(self, one: Place, other: Place, *, one_way: bool = False) -> None:
        """Drop what the first sends to the second, and unless ``one_way`` the other direction too; nobody is told."""
        for sender, to in self._directions(one, other, one_way):
            for address in (to.address, to.address6):
                run("-n", sender.namespace, "neigh", "replace", address, "lladdr", NOBODY, "nud", "permanent",
                    "dev", sender.device)  # fmt: skip

    def mend(self, one: Place, other: Place, *, one_way: bool = False) -> None:
        for sender, to in self._directions(one, other, one_way):
            for address in (to.address, to.address6):
                ip("-n", sender.namespace, "neigh", "del", address, "dev", sender.device)

    def split(self, *sides: Sequence[Host]) -> None:
        """Partition the hosts: nothing passes between two sides any more."""
        for one, other in self._across(sides):
            self.cut(one, other)

    def rejoin(self, *sides: Sequence[Host]) -> None:
        for one, other in self._across(sides):
            self.mend(one, other)

    @staticmethod
    def _directions(one: Place, other: Place, one_way: bool) -> list[tuple[Place, Place]]:
        return [(one, other)] if one_way else [(one, other), (other, one)]

    @staticmethod
    def _across(sides: Sequence[Sequence[Host]]) -> Iterator[tuple[Place, Place]]:
        for these, those in itertools.combinations(sides, 2):
            for here, there in itertools.product(these, those):
                yield from itertools.product(here.places, there.places)


def tc(*arguments: str) -> None:
    """Run ``tc``; the test is skipped where the kernel lacks what it asks for."""
    if shutil.which("tc") is None:
        pytest.skip("shaping a link needs tc (apt-get install iproute2)")
    done = subprocess.run(["tc", *arguments], capture_output=True, text=True, timeout=90)
    if "qdisc kind is unknown" in done.stderr:
        pytest.skip(f"this kernel was built without it: tc {' '.join(arguments)}")
    assert done.returncode == 0, f"tc {' '.join(arguments)}: {done.stderr.strip()}"


@contextmanager
def new_box(num_hosts: int, *, split_workers: bool = False) -> Iterator[Box]:
    """Hosts ``host0``, ``host1`` and so on that reach one another; the test is skipped where there can be none."""
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            pytest.skip(f"hosts in a box need {program} (apt-get install {package})")
    name = f"phx{uuid.uuid4().hex[:6]}"
    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}; they need root, or CAP_SYS_ADMIN")
    namespaces = [name]
    hosts: list[Host] = []
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-box-") as folder:
            _skip_unless(f"-n {name} link add switch type bridge")
            run("-n", name, "link", "set", "switch", "up")
            names = [f"host{number}" for number in range(num_hosts)]
            for number, each in enumerate(names):
                main = _plug_in(name, f"{name}h{number}", number + 1, namespaces)
                workers = _plug_in(name, f"{name}w{number}", number + 101, namespaces) if split_workers else main
                hosts.append(Host(name=each, main=main, workers=workers, switch=name, hosts_file=Path(folder, "hosts")))
            Path(folder, "hosts").write_text(_known_names(hosts))
            for host in hosts:
                host.start()
            yield Box(tuple(hosts))
    finally:
        for host in hosts:
            host.stop()
        for namespace in namespaces:
            _remove(namespace)


def _plug_in(switch: str, namespace: str, number: int, namespaces: list[str]) -> Place:
    """Make a network namespace with one link to the switch."""
    run("netns", "add", namespace)
    namespaces.append(namespace)
    place = Place(
        namespace=namespace, device="eth0", port=f"port{number}", address=f"10.77.0.{number}",
        address6=f"fd77::{number}",
    )  # fmt: skip
    _skip_unless(f"-n {switch} link add {place.port} type veth peer name {place.device} netns {namespace}")
    run("-n", switch, "link", "set", place.port, "master", "switch", "up")
    run("-n", namespace, "link", "set", "lo", "up")
    run("-n", namespace, "addr", "add", f"{place.address}/24", "dev", place.device)
    run("-n", namespace, "addr", "add", f"{place.address6}/64", "dev", place.device, "nodad")
    run("-n", namespace, "link", "set", place.device, "up")
    return place


def _known_names(hosts: Sequence[Host]) -> str:
    """What ``/etc/hosts`` of every host says. torch asks for the name behind each connection, as mapped to IPv6."""
    lines = ["127.0.0.1 localhost", "::1 localhost", "::ffff:127.0.0.1 loopback4"]
    for host in hosts:
        lines += [f"{host.address} {host.name}", f"{host.main.address6} {host.name}"]
        lines += [f"::ffff:{place.address} {place.namespace}" for place in host.places]
    return "\n".join([*lines, ""])


def _skip_unless(command: str) -> None:
    done = ip(*command.split())
    if done.returncode:
        pytest.skip(f"ip {command}: {done.stderr.strip()}")


def _remove(namespace: str) -> None:
    """Delete a network namespace; its links go with it. For a moment a killed process may still hold it."""
    deadline = time.monotonic() + 30
    while ip("netns", "del", namespace).returncode and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture
def box_of_three() -> Iterator[Box]:
    with new_box(3) as made:
        yield made
