"""Finds the address under which the others of a job reach this machine, and the interface that has it.

Owns the choice where the machine's own name is of no use: a name that leads to the loopback interface only (Debian's
``127.0.1.1``). Then the address is taken from which packets to the job's endpoint leave; where the
endpoint is this machine too, that of its first interface that is no loopback.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_ENV_INTERFACE = "GLOO_SOCKET_IFNAME"
Lookup = Callable[[str], list[str]]


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
    ordered = [str(each[4][0]) for family in families for each in found if each[0] == family]
    return list(dict.fromkeys(ordered))


def interfaces() -> dict[str, str]:
    """Return this machine's addresses, each with its interface: the main IPv4 address of each, all of IPv6."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[socket.inet_ntoa(answer[20:24])] = name
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:
        return found  # no IPv6 here
    return found | {str(ipaddress.IPv6Address(int(row[0], 16))): row[5] for row in rows}


def source_towards(host: str, port: int) -> str:
    """Return the address from which this machine sends to a host; empty where no way leads there. Sends nothing."""
    for address in addresses_of(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port or 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def advertised_address(name: str, host: str, port: int, *, lookup: Lookup = addresses_of) -> str:
    """Return what the others of a job are told that this machine is called: ``name``, unless that is of no use to them.

    ``host`` and ``port`` are where the job's store is; empty where it is at no host, as in a directory.
    """
    if is_known_outside(name, lookup) or not lookup(name):
        return name  # in doubt others may know it
    source = source_towards(host, port) if host else ""
    if not source or _is_loopback(source):
        usable = [each for each in interfaces() if not _is_loopback(each) and not _is_link_local(each)]
        source = usable[0] if usable else ""
    if not source:
        return name
    log.warning(
        "this machine's name %s leads to the loopback interface only; the others are told %s instead (choose another "
        "with --local-addr)",
        name,
        source,
    )
    return source


def gloo_interface(environ: Mapping[str, str], address: str, *, lookup: Lookup = addresses_of) -> dict[str, str]:
    """Name the interface of ``address`` to gloo, which would else listen where the machine's name leads: on loopback.

    Nothing where the user has named one, or the name is good.
    """
    if environ.get(_ENV_INTERFACE) or is_known_outside(socket.gethostname(), lookup):
        return {}
    known = interfaces()
    found = [known[each] for each in lookup(address) if each in known]
    return {_ENV_INTERFACE: found[0]} if found else {}


def is_known_outside(name: str, lookup: Lookup = addresses_of) -> bool:
    """Return whether a name leads to an address that is not loopback."""
    return any(not _is_loopback(address) for address in lookup(name))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local
