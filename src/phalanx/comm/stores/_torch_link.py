"""One client of a torch store, mostly a TCPStore, made safe: bounded, never silently desynchronised.

Owns the native client and turns its errors into ours. What it works around, all seen on torch 2.13: ``get``
and ``multi_get`` block for absent keys (``read`` does not: a compare-and-set that can never match answers
with the current value in one round trip); ``set`` is not acknowledged (``write`` is); a server that hangs
or whose host vanished blocks a call for ever (the socket gets a receive timeout); after such a timeout
replies would be read by the wrong call (the connection is given up for good).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # from where its stub can be seen

from phalanx.errors import StoreLost

log = logging.getLogger(__name__)

T = TypeVar("T")

REPLY_TIMEOUT = 20.0
"""Seconds a server may take for one answer before it counts as gone. One that died is noticed at once; this is for a
host that vanished, and must outlast a machine that swaps or is overloaded."""

HANDSHAKE_TIMEOUT = 30.0
"""Seconds for torch's greeting once the port answers. Torch asks the name server who the peer is, for its log; a
name server that drops requests costs 5 s each (seen), which must not look like a lost store."""

_NEVER = b"\x00never a stored value"
_TICK = "p/tick"


class Link:
    """One native client. Thread-safe. ``fork`` makes another one of the same store.

    ``batched``: the native timeout is ours and short, so that ``multi_get`` may be used.
    """

    def __init__(self, native: Any, address: str, fork: Callable[[], Link], *, batched: bool) -> None:
        self.native = native  # Any: torch's stubs know text only, the calls take bytes as well
        self.address = address
        self._fork = fork
        self._batched = batched
        self._lost: str | None = None

    def call(self, operation: Callable[[], T]) -> T:
        """Run one native call; a network error loses the link for good."""
        if self._lost is not None:
            raise StoreLost(self._lost, address=self.address)
        try:
            return operation()
        except dist.DistNetworkError as error:
            self.lose(f"lost the store {self.address}: {str(error).splitlines()[0]}")
            raise StoreLost(str(self._lost), address=self.address) from error

    def lose(self, why: str) -> None:
        self._lost = self._lost or why

    def read(self, key: str) -> bytes | None:
        raw = self.call(lambda: self.native.compare_set(key, _NEVER, _NEVER))
        return None if raw == _NEVER else raw

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if self._batched and len(keys) > 2 and self.call(lambda: self.native.check(list(keys))):
            try:
                return list(self.call(lambda: self.native.multi_get(list(keys))))
            except dist.DistStoreError:
                pass  # a key vanished meanwhile; one by one then
        return [self.read(key) for key in keys]

    def write(self, key: str, raw: bytes, tick: bytes) -> None:
        """Write and wait for the acknowledgement (that of a harmless read: the server answers in order)."""
        self.call(lambda: self.native.multi_set([key, _TICK], [raw, tick]))
        self.read(_TICK)

    def swap(self, key: str, expected: bytes | None, raw: bytes) -> bool:
        """Compare-and-set of raw entries; ``raw`` must be a distinct one."""
        return bool(self.call(lambda: self.native.compare_set(key, expected or b"", raw)) == raw)

    def tick(self, token: bytes) -> None:
        """Tell watches that something changed."""
        self.call(lambda: self.native.set(_TICK, token))

    def read_tick(self) -> bytes | None:
        return self.read(_TICK)

    def list_keys(self) -> list[str]:
        """All keys. One whose name is no text can only be a stranger's; torch cannot list any while it is there."""
        while True:
            try:
                return list(self.call(self.native.list_keys))
            except UnicodeDecodeError as error:
                name = error.object
                log.warning("deleted a key of %s whose name is no text: %r", self.address, name[:60])
                self.call(partial(self.native.delete_key, name))

    def delete(self, key: str) -> bool:
        return bool(self.call(lambda: self.native.delete_key(key)))

    def fork(self) -> Link:
        """Another connection to the same store."""
        if self._lost is not None:
            raise StoreLost(self._lost, address=self.address)
        return self._fork()


def connect_link(host: str, port: int, *, timeout: float) -> Link:
    """Connect to the TCPStore server at ``host:port``."""
    address = tcp_address(host, port)
    _wait_for_server(host, port, timeout, address)
    try:
        native = TCPStore(
            host,
            port,
            None,
            False,
            timedelta(seconds=max(timeout, HANDSHAKE_TIMEOUT)),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise StoreLost(f"cannot connect to the store {address}: {error}", address=address) from error
    native.set_timeout(timedelta(seconds=0.25))  # only multi_get uses it, see read_many
    bound_replies(port)
    return Link(native, address, lambda: connect_link(host, port, timeout=1.0), batched=True)


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _wait_for_server(host: str, port: int, timeout: float, address: str) -> None:
    """Torch's own connecting retries with growing pauses and logs; ask the port first, so both stay short."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.05, left)).close()
            return
        except OSError as error:
            if left <= 0.02:
                raise StoreLost(
                    f"cannot connect to the store {address} in {timeout:g} s: {error}", address=address
                ) from error
        time.sleep(0.02)


def bound_replies(port: int) -> None:
    """Give this process's sockets towards ``port`` a receive timeout: torch offers no handle on its own."""
    limit = struct.pack("ll", int(REPLY_TIMEOUT), int(REPLY_TIMEOUT % 1 * 1e6))
    for name in os.listdir("/dev/fd"):
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
            try:
                if copy.getpeername()[1] == port:
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            except (OSError, IndexError):
                continue  # not connected, or not of a kind that has a port
