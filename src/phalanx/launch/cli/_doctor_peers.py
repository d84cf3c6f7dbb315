"""Says how this machine reaches others, over which interface and how fast: ``phalanx doctor --peers``, ``--listen``.

Owns the words and the choice of what to measure: every address of every peer, those that the peer tells of itself
included. What a job would use is what ``reach`` finds first, since that is what a job asks. The other end answers with
``phalanx doctor --listen``; both may be given, so that the same line runs on all machines.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from phalanx._reach import Unreachable, Way, addresses_of, reach, split_host_port
from phalanx.launch.cli._finding import Finding, closing_words, worst_of
from phalanx.launch.system._addresses import advertised_address, interfaces
from phalanx.launch.system._listen_address import is_literal
from phalanx.launch.system._path_probe import NotAListener, PathListener, PathProbe

DEFAULT_PORT = 29398
SLOW = 12.5e6
"""Bytes per second below which a path gets a warning: 100 Mbit/s."""
MUCH_FASTER = 1.5
_PROBE = 20.0
"""Seconds that the measurement of one path may take."""


@dataclass(frozen=True)
class Path:
    """One way to a peer as it was measured; with ``error`` it was not. Seconds, and bytes per second."""

    peer: str
    address: str
    source: str = ""
    interface: str = ""
    latency: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    is_used: bool = False
    error: str = ""

    @property
    def rate(self) -> float:
        return min(self.sent, self.received)


def run(peers: Sequence[str], listen: str | None, seconds: float, *, as_json: bool) -> int:
    """Measure the paths to ``peers``, and answer for ``seconds`` who measures, if asked to; the exit code."""
    found: list[Finding] = []
    paths: list[Path] = []
    ends = time.monotonic() + seconds

    def say(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            print(finding, flush=True)

    listener = None
    if listen is not None:
        host, port = split_peer(listen, DEFAULT_PORT, default_host="127.0.0.1")
        try:
            listener = PathListener(host, port, _told(host))
        except OSError as error:
            say(Finding("bad", f"cannot listen at {host} port {port}: {error}"))
            return _finish(found, paths, as_json)
        say(Finding("ok", _where(listener, seconds)))
    try:
        for peer in peers:
            host, port = split_peer(peer, DEFAULT_PORT)
            patience = max(2.0, ends - time.monotonic()) if listener is not None else min(seconds, 5.0)
            measured = list(measure_peer(host, port, patience))
            paths += measured
            for finding in findings_of(host, port, measured):
                say(finding)
        if listener is not None:
            time.sleep(max(0.0, ends - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        if listener is not None:
            listener.close()
    return _finish(found, paths, as_json)


def _finish(found: Sequence[Finding], paths: Sequence[Path], as_json: bool) -> int:
    worst = worst_of(found)
    if as_json:
        rows = [{"level": finding.level, "text": finding.text} for finding in found]
        print(json.dumps({"worst": worst, "findings": rows, "paths": [asdict(path) for path in paths]}))
    else:
        print(closing_words(worst))
    return 1 if worst == "bad" else 0


def split_peer(text: str, default_port: int, *, default_host: str = "") -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[v6]:port`` or a bare IPv6 address; a number alone is a port if there
    is a default host.

    >>> split_peer("node1", 1), split_peer("[::1]:80", 1), split_peer("fd00::1", 1)
    (('node1', 1), ('::1', 80), ('fd00::1', 1))
    >>> split_peer("80", 1, default_host="127.0.0.1")
    ('127.0.0.1', 80)
    """
    is_port = default_host and (not text or text.isdecimal())
    found = split_host_port(f"[{default_host}]:{text}" if is_port else text, default_port)
    if found is None:
        raise ValueError(f"{text!r} is no host; expected HOST, HOST:PORT or [IPv6]:PORT")
    return found


def measure_peer(host: str, port: int, patience: float) -> Iterator[Path]:
    """Measure each address of a peer: the one that answers first as jobs would, then the others of its name, and those
    that it tells of itself."""
    deadline = time.monotonic() + patience
    own = interfaces()
    while True:
        try:
            connection, way = reach(host, port, max(0.1, deadline - time.monotonic()))
            break
        except Unreachable as error:
            if time.monotonic() >= deadline - 0.2:
                yield Path(host, "", error=str(error.strerror))
                return
        time.sleep(0.2)  # it may be about to start
    first, told = _measured(host, connection, way, own, is_used=True)
    yield first
    if first.error:
        return
    named = addresses_of(host)
    for address in dict.fromkeys([*named, *told]):
        if address == way.address:
            continue
        try:
            connection, other = reach(address, port, 2.0)
        except Unreachable as error:
            if address in named:  # what else it tells of itself may be of a network that is not ours
                yield Path(host, address, error=str(error.strerror))
            continue
        yield _measured(host, connection, other, own, is_used=False)[0]


def _measured(
    peer: str, connection: socket.socket, way: Way, own: dict[str, str], *, is_used: bool
) -> tuple[Path, list[str]]:
    """Return one path, and what the peer tells of its addresses."""
    path = Path(peer, way.address, way.source, _interface(way, own), is_used=is_used)
    try:
        with connection, PathProbe(connection, _PROBE) as probe:
            told = [each for each in probe.addresses() if is_literal(each)]
            speed = probe.measure()
    except (OSError, ValueError) as error:
        kind = "" if isinstance(error, NotAListener) else f"{type(error).__name__}: "
        return replace(path, error=f"{kind}{error}"), []
    return replace(path, latency=speed.latency, sent=speed.sent, received=speed.received), told


def _interface(way: Way, own: dict[str, str]) -> str:
    """Name the interface that packets leave by: to this machine itself the loopback one, whatever the address."""
    source, address = (ipaddress.ip_address(each.partition("%")[0]) for each in (way.source, way.address))
    return "lo" if source.is_loopback or source == address else own.get(str(source), "")


def findings_of(host: str, port: int, paths: Sequence[Path]) -> Iterator[Finding]:
    """Say what the paths to one peer mean for a job."""
    used = next((path for path in paths if path.is_used and not path.error), None)
    if used is None:
        why = next((path.error for path in paths if path.error), "it has no address")
        yield Finding(
            "bad", f"{host}: {why}. Is `phalanx doctor --listen 0.0.0.0:{port}` running there, and the port open?"
        )
        return
    level = "ok" if used.rate >= SLOW else "warn"
    yield Finding(level, f"{host}: a job will use {_words(used)}{'' if level == 'ok' else '; that is slow'}")
    for path in paths:
        if path is used:
            continue
        if path.error:
            yield Finding("warn", f"{host}: its address {path.address} does not work from here: {path.error}")
        elif path.interface != used.interface and path.rate > MUCH_FASTER * used.rate:
            yield Finding(
                "warn",
                f"{host}: {path.rate / used.rate:.1f} times as fast is {_words(path)}. To use it, name {path.address} "
                f"in the endpoint, and give each node its address there with --local-addr and "
                f"GLOO_SOCKET_IFNAME={path.interface or 'its interface'}",
            )
        else:
            yield Finding("ok", f"{host}: also reached by {_words(path)}")
    if not ipaddress.ip_address(used.source.partition("%")[0]).is_loopback:
        told = advertised_address(socket.getfqdn(), used.address, port)
        yield Finding("ok", f"in a job whose endpoint is {host}, the others are told that this machine is {told}")


def _words(path: Path) -> str:
    return (
        f"{path.interface or 'an unknown interface'} ({path.source} to {path.address}): round trip "
        f"{path.latency * 1e3:.2f} ms, {path.sent / 1e6:.0f} MB/s there, {path.received / 1e6:.0f} MB/s back"
    )


def _told(host: str) -> list[str]:
    """Return where else a listener is reached: this machine's addresses, if it listens at all of them."""
    if host not in ("0.0.0.0", "::"):
        return []
    return [
        each
        for each in interfaces()
        if not (ipaddress.ip_address(each).is_loopback or ipaddress.ip_address(each).is_link_local)
        and (host == "::" or ":" not in each)
    ]


def _where(listener: PathListener, seconds: float) -> str:
    host, port = listener.address
    shown = f"[{host}]" if ":" in host else host
    hint = "; only this machine gets there" if ipaddress.ip_address(host).is_loopback else ""
    return f"answering probes at {shown}:{port} for {seconds:g} s{hint}"
