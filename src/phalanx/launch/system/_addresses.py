"""Finds the address under which the others of a job reach this machine, and the interface that has it.

Owns the choice: what worked is told. The job's endpoint was reached from an address of this machine; the machine's own
name is told if it stands for that address, else the address itself. The name may lead to the loopback interface only
(Debian's ``127.0.1.1``), to another interface, to a machine in front of this one, or nowhere (a container's name).
Where the endpoint is this machine too, the first interface that is no loopback counts.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Mapping

from phalanx._reach import Unreachable, addresses_of, family_of, reach

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_PATIENCE = 2.0
"""Seconds for the endpoint to answer, if none of its addresses so much as refuses."""
_ENV_INTERFACE = "GLOO_SOCKET_IFNAME"
Lookup = Callable[[str], list[str]]


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


def source_towards(host: str, port: int, *, patience: float = _PATIENCE) -> str:
    """Return the address from which this machine reaches a host; empty where no way leads there.

    All addresses of the host are tried. If none answers, as before it is up, the way is that of a packet to the first.
    """
    try:
        connection, way = reach(host, port or 9, patience)
        connection.close()
        return way.source
    except Unreachable as error:
        if error.refused is not None:
            return error.refused.source  # nobody listens there yet, but the host is there
    for address in addresses_of(host):
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
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
    source = source_towards(host, port) if host else ""
    is_way = bool(source) and not _is_loopback(source) and not _is_link_local(source)
    known = lookup(name)
    if source in known or (not is_way and (is_known_outside(name, lookup) or not known)):
        return name  # in doubt others may know it
    if not is_way:
        usable = [each for each in interfaces() if not _is_loopback(each) and not _is_link_local(each)]
        source = usable[0] if usable else ""
    if not source:
        return name
    log.warning(
        "this machine's name %s leads %s; the others are told %s instead (choose another with --local-addr)",
        name,
        _leads_where(known),
        source,
    )
    return source


def _leads_where(addresses: list[str]) -> str:
    if not addresses:
        return "nowhere from here"
    outside = [each for each in addresses if not _is_loopback(each)]
    if not outside:
        return "to the loopback interface only"
    return f"to {', '.join(outside)}, which is not how this machine reaches the store"


def gloo_interface(environ: Mapping[str, str], address: str, *, lookup: Lookup = addresses_of) -> dict[str, str]:
    """Name the interface of ``address`` to gloo, which would else listen where the machine's name leads: on loopback,
    or on an interface that the others were not told.

    Nothing where the user has named one, or the name leads there anyhow.
    """
    told = lookup(address)
    by_name = [each for each in lookup(socket.gethostname()) if not _is_loopback(each)]
    if environ.get(_ENV_INTERFACE) or (by_name and by_name[0] in told):
        return {}
    known = interfaces()
    found = [known[each] for each in told if each in known and not _is_loopback(each)]
    return {_ENV_INTERFACE: found[0]} if found else {}


def is_known_outside(name: str, lookup: Lookup = addresses_of) -> bool:
    """Return whether a name leads to an address that is not loopback."""
    return any(not _is_loopback(address) for address in lookup(name))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local
