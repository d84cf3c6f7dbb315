"""Machines that lose the network between them, as network namespaces: what goes on here, and what goes on there.

Owns making and removing a namespace and its links, and the faults of a link: cut (both ends see that it is down) and
silent (both ends seem fine, and nothing arrives).
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

NOBODY = "02:00:00:00:00:01"
"""A hardware address that no end of a link has."""


@dataclass(frozen=True)
class Link:
    """One link to a namespace, by the names and addresses of its two ends."""

    namespace: str
    device: str
    device_there: str
    here: str
    there: str

    def cut(self) -> None:
        run("link", "set", self.device, "down")

    def silence(self) -> None:
        """Drop all that is sent, at both ends, without a word to whoever sends."""
        self._send_to("replace", "lladdr", NOBODY, "nud", "permanent")

    def restore(self) -> None:
        run("link", "set", self.device, "up")
        self._send_to("del")

    def _send_to(self, verb: str, *words: str) -> None:
        for where, peer, device in (
            ((), self.there, self.device),
            (("-n", self.namespace), self.here, self.device_there),
        ):
            ip(*where, "neigh", verb, peer, *words, "dev", device)


@dataclass(frozen=True)
class Namespace:
    name: str
    links: tuple[Link, ...]

    def inside(self, *command: str) -> list[str]:
        """The command, run in the namespace."""
        return ["ip", "netns", "exec", self.name, *command]


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=90)


def run(*arguments: str) -> None:
    done = ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


@contextmanager
def new_namespace(num_links: int = 1) -> Iterator[Namespace]:
    """A namespace with links to this one; the test is skipped where there can be none."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2 (apt-get install iproute2)")
    name = f"phx{uuid.uuid4().hex[:6]}"
    made = ip("netns", "add", name)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}; they need root, or CAP_SYS_ADMIN")
    links = tuple(_plan(name, number) for number in range(num_links))
    try:
        for command in (f"-n {name} link set lo up", *(line for link in links for line in _commands(link))):
            done = ip(*command.split())
            if done.returncode:
                pytest.skip(f"ip {command}: {done.stderr.strip()}")
        yield Namespace(name, links)
    finally:
        for link in links:
            ip("link", "del", link.device)
        ip("netns", "del", name)


def _plan(name: str, number: int) -> Link:
    # Another run on this machine may be at the same test: each has a network of its own.
    high, low = uuid.uuid4().bytes[:2]
    here, there = (f"10.{213 + number}.{high}.{low // 4 * 4 + host}" for host in (1, 2))
    return Link(name, f"{name}a{number}", f"{name}b{number}", here, there)


def _commands(link: Link) -> Iterator[str]:
    name = link.namespace
    yield f"link add {link.device} type veth peer name {link.device_there} netns {name}"
    yield f"addr add {link.here}/30 dev {link.device}"
    yield f"link set {link.device} up"
    yield f"-n {name} addr add {link.there}/30 dev {link.device_there}"
    yield f"-n {name} link set {link.device_there} up"
