"""Finds which of a host's addresses answers: all are tried, each a moment after the one before, and the first wins.

Owns ``reach``. A name may stand for several addresses (several interfaces, IPv4 and IPv6) of which some lead nowhere
from here: a packet that is dropped on the way must not keep the others from being tried. Imports nothing of ours, and
no torch: the launcher and the stores both ask.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from dataclasses import dataclass

STAGGER = 0.1
"""Seconds after which the next address is tried while the one before has not answered."""


@dataclass(frozen=True)
class Way:
    """An address of a host that answers, and the address of this machine from which it is reached."""

    address: str
    source: str


class Unreachable(OSError):
    """No address of a host let anybody in; ``refused`` is the first that said so, which is an answer too."""

    def __init__(self, message: str, refused: Way | None) -> None:
        super().__init__(errno.ECONNREFUSED if refused else errno.EHOSTUNREACH, message)
        self.refused = refused


def addresses_of(host: str) -> list[str]:
    """Return all addresses of a name, IPv4 first, each once; none where it leads nowhere.

    >>> addresses_of("127.0.0.1")
    ['127.0.0.1']
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    families = (socket.AF_INET, socket.AF_INET6)
    ordered = [_text(each[4]) for family in families for each in found if each[0] == family]
    return list(dict.fromkeys(ordered))


def split_host_port(text: str, default_port: int) -> tuple[str, int] | None:
    """Return host and port of ``host``, ``host:port``, ``[v6]:port`` or a bare IPv6 address; None for anything else.

    >>> split_host_port("node1", 1), split_host_port("[::1]:80", 1), split_host_port("fd00::1", 1)
    (('node1', 1), ('::1', 80), ('fd00::1', 1))
    >>> split_host_port("node1:http", 1), split_host_port(":80", 1)
    (None, None)
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or (port and not port.isdecimal()) or int(port or default_port) > 65535:
        return None
    return host, int(port) if port else default_port


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def reach(host: str, port: int, timeout: float) -> tuple[socket.socket, Way]:
    """Connect to whichever address of ``host`` answers first; ``Unreachable`` says of each why not.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     connection, way = reach("localhost", server.getsockname()[1], 5.0)
    >>> connection.close(); way.address
    '127.0.0.1'
    """
    waiting = addresses_of(host)
    if not waiting:
        raise Unreachable(f"the name {host!r} leads to no address", None)
    deadline = time.monotonic() + timeout
    why: dict[str, str] = {}
    refused: list[Way] = []
    with _Dialled(port) as attempts:
        turn = 0.0
        while waiting or attempts.running:
            now = time.monotonic()
            if waiting and (now >= turn or not attempts.running):
                address, turn = waiting.pop(0), now + STAGGER
                trouble = attempts.begin(address)
                if trouble:
                    why[address] = trouble
                continue
            if now >= deadline:
                break
            for address, number in attempts.wait(min(deadline, turn if waiting else deadline) - now):
                if number == 0:
                    return attempts.take(address)
                if number == errno.ECONNREFUSED:
                    refused.append(attempts.way(address))
                why[address] = os.strerror(number)
                attempts.end(address)
        why |= dict.fromkeys(attempts.running, f"no answer within {timeout:g} s")
    listed = ", ".join(f"{address}: {reason}" for address, reason in why.items())
    raise Unreachable(f"{host} port {port}: {listed}", refused[0] if refused else None)


class _Dialled:
    """Connections that are being made, by address."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self.running: dict[str, socket.socket] = {}

    def __enter__(self) -> _Dialled:
        return self

    def __exit__(self, *exception: object) -> None:
        for address in list(self.running):
            self.end(address)
        self._selector.close()

    def begin(self, address: str) -> str:
        """Start to connect; returns why that cannot be, or ""."""
        sock = socket.socket(family_of(address), socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            where = socket.getaddrinfo(address, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]
            number = sock.connect_ex(where)
        except OSError as error:
            sock.close()
            return str(error)
        if number not in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
            sock.close()
            return os.strerror(number)
        self.running[address] = sock
        self._selector.register(sock, selectors.EVENT_WRITE, address)
        return ""

    def wait(self, seconds: float) -> list[tuple[str, int]]:
        ready = self._selector.select(max(0.0, seconds))
        return [(key.data, self.running[key.data].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) for key, _ in ready]

    def way(self, address: str) -> Way:
        try:
            return Way(address, _text(self.running[address].getsockname()))
        except OSError:
            return Way(address, "")

    def take(self, address: str) -> tuple[socket.socket, Way]:
        way = self.way(address)
        sock = self.running.pop(address)
        self._selector.unregister(sock)
        sock.setblocking(True)
        return sock, way

    def end(self, address: str) -> None:
        sock = self.running.pop(address)
        self._selector.unregister(sock)
        sock.close()


def _text(where: object) -> str:
    """Return the address of a socket's name, with its zone where it is of one link only."""
    assert isinstance(where, tuple), "of the internet"
    host = str(where[0])
    if len(where) == 4 and where[3] and "%" not in host:
        return f"{host}%{where[3]}"
    return host
