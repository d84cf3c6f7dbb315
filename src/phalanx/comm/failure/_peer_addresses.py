"""Finds the rank behind an address: gloo's errors name the address of a peer whose connection ended, not its rank.

Owns the addresses of a process's end of its connections (gloo names that of the listener or that of the connection,
depending on who called whom), as it tells them the others when a group forms, and reading one out of an error's words.
Where a process cannot list its sockets nobody is named.
"""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING

from phalanx.comm._sockets import own_sockets
from phalanx.errors import StoreError

if TYPE_CHECKING:
    from phalanx.comm.stores import Store

_ADDRESS = re.compile(r"\[([0-9a-fA-F.:%\w]+)\]:(\d+)")


def own_addresses() -> list[str]:
    """``[host]:port`` of this process's end of every TCP socket that it has."""
    found = []
    for own in own_sockets():
        try:
            if own.family in (socket.AF_INET, socket.AF_INET6):
                host, port = own.getsockname()[:2]
                found.append(f"[{host}]:{port}")
        except OSError:
            continue  # closed by its owner meanwhile
    return found


def publish(store: Store, rank: int) -> None:
    """Tell the others of a group which addresses are this rank's."""
    store.set(f"addresses/{rank}", json.dumps(own_addresses()).encode())


def rank_named(text: str, store: Store, size: int) -> int | None:
    """Return the rank that has the address which ``text`` names; None when it names none, or nobody's."""
    found = _ADDRESS.search(text)
    if found is None:
        return None
    host, port = found[1], int(found[2])
    # gloo prints the port in the order of the network's bytes (torch 2.13), and may one day print it right.
    wanted = {f"[{host}]:{port}", f"[{host}]:{socket.htons(port & 0xFFFF)}"}
    try:
        records = store.get_many([f"addresses/{rank}" for rank in range(size)])
    except StoreError:
        return None
    for rank, record in enumerate(records):
        try:
            if record is not None and not wanted.isdisjoint(json.loads(record)):
                return rank
        except (ValueError, TypeError):
            continue  # not what a rank writes
    return None
