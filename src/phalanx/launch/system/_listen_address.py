"""Finds the address that a server listens at: the one that others were told, and nowhere else.

Owns the way from a name to the address of this machine that it stands for.
"""

from __future__ import annotations

import ipaddress
import logging
import socket

log = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bind_address(host: str) -> str:
    """Return the address to listen at, so that those who were told ``host`` get through.

    >>> bind_address("localhost"), bind_address("::1")
    ('127.0.0.1', '::1')

    All interfaces, with a line in the log, where that cannot be known: the name leads here to the loopback interface
    only (as Debian's /etc/hosts has it for the machine's own name), or to an address that is not this machine's (a
    translator stands in front of it).
    """
    if host == "localhost":
        return "127.0.0.1"
    addresses = _own_addresses(host)
    if is_literal(host) and addresses:
        return addresses[0]
    outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if outside:
        return outside[0]
    everywhere = "::" if ":" in host else "0.0.0.0"
    log.warning(
        "listening on all interfaces: %s leads %s; name an address of this machine to listen there alone",
        host,
        "to the loopback interface only" if addresses else "to no address of this machine",
    )
    return everywhere


def _own_addresses(host: str) -> list[str]:
    """Return the addresses of ``host`` that this machine can listen at, IPv4 first: that is what names were served
    at before machines had both."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = []
    for family, kind, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
        addresses.append(str(address[0]).partition("%")[0])
    return addresses


def is_literal(host: str) -> bool:
    """Return whether a host is given by its address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
