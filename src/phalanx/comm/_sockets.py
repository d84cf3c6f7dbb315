"""Walks the sockets of this process: torch's engines open their own and offer no handle on them.

Works on duplicates of the descriptors, so that closing one here closes nobody else's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator


def own_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every socket that this process has, and close it; none where there is no ``/dev/fd``.

    A socket may be closed by its owner meanwhile: asking it anything may raise ``OSError``.
    """
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        try:
            number = os.dup(int(name))
        except OSError:
            continue  # gone already
        try:
            copy = socket.socket(fileno=number)
        except OSError:
            os.close(number)  # not a socket
            continue
        with copy:
            yield copy
