"""Makes one client of a torch store, mostly a TCPStore, safe: bounded, never silently desynchronised.

Owns the native client and turns its errors into ours. What it works around, all seen on torch 2.13: ``get``
and ``multi_get`` block for absent keys (``read`` does not: a compare-and-set that can never match answers
with the current value in one round trip); ``set`` is not acknowledged (``write`` is); a server that hangs
or whose host vanished blocks a call for ever (the socket gets a receive timeout); after such a timeout
replies would be read by the wrong call (the connection is given up).

A connection that ends, or is silent, while the server is fine (reset by a router, a firewall, a laptop that slept; a
network that was away, whose senders wait ever longer until they try again) is made anew, and the call is repeated: to
the same server only, known by a key that ``TCPStore.serve`` leaves there. The name of that key tells, not its value,
over which anybody may write. Repeating harms nothing, because entries are distinct: a compare-and-set that was carried
out already finds its own entry. Calls of which that is not true (``add``, taking from a queue) are not repeated; they
raise.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from phalanx._reach import Unreachable, reach
from phalanx.comm._sockets import own_sockets
from phalanx.errors import StoreLost

log = logging.getLogger(__name__)

T = TypeVar("T")

REPLY_TIMEOUT = 20.0
"""Seconds a server may take for one answer before it counts as gone. One that died is noticed at once; this is for a
host that vanished, and must outlast a machine that swaps or is overloaded."""

HANDSHAKE_TIMEOUT = 30.0
"""Seconds for torch's greeting once the port answers. Torch asks the name server who the peer is, for its log; a
name server that drops requests costs 5 s each (seen), which must not look like a lost store."""

REOPEN_TIMEOUT = 5.0
"""Seconds for a new connection to a server whose last one has just ended."""

_NEVER = b"\x00never a stored value"
_TICK = "p/tick"
_NEW_LINK = "new connection "
_SERVER = "p/server"
"""Names the key that tells one server from another at the same address; that key's own name begins with it, too."""
_ONE_BY_ONE = 4
"""Up to so many keys, of which some are mostly missing, are read one by one."""
_ATTEMPTS = 4
"""How often a call is tried when its connection ends again and again: whoever ends one may well end the next."""


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
        self._lock = threading.Lock()
        self._server: tuple[str, ...] = ()
        if batched:
            self._server = self._find_server()

    def call(self, operation: Callable[[], T], *, repeat: bool = True) -> T:
        """Run one native call. A network error loses the link for good, unless the same server answers again."""
        attempts, was_late = _ATTEMPTS if repeat else 1, False
        while True:
            if self._lost is not None:
                raise StoreLost(self._lost, address=self.address)
            native = self.native
            try:
                return operation()
            except dist.DistNetworkError as error:
                attempts -= 1
                why = f"lost the store {self.address}: {str(error).splitlines()[0]}"
                # The network may have been away for so long. A server that hangs does not greet; if it does, once more.
                is_late = "timeout" in why.lower()
                if (is_late and was_late) or not self._reopen(native):
                    self.lose(why)
                if self._lost is not None or not attempts:
                    raise StoreLost(self._lost or why, address=self.address) from error
                was_late = is_late

    def _reopen(self, broken: Any) -> bool:
        """Replace a connection that has ended, unless another thread has; whether it is to the same server."""
        with self._lock:
            if self.native is not broken:
                return True
            if not self._server or self._lost is not None:
                return False
            for _ in range(_ATTEMPTS):
                other = _within(REOPEN_TIMEOUT, self._fork)
                if other is None:
                    return False
                try:
                    if not any(other.native.check([key]) for key in self._server):
                        # Somebody else's store, or a server that was started anew: it knows nothing of us.
                        return False
                    # A tick that went into the old connection may be lost; watches must not miss what it told of.
                    other.native.set(_TICK, f"{_NEW_LINK}{secrets.token_hex(8)}")
                except dist.DistNetworkError:
                    continue  # that one has ended as well
                self.native = other.native
                log.info("the connection to the store %s had ended; there is a new one", self.address)
                return True
            return False

    def _find_server(self) -> tuple[str, ...]:
        """Return the keys of which one tells this server from every other; none where nobody left any."""
        try:
            name = bytes(self.native.compare_set(_SERVER, _NEVER, _NEVER))
            if name == _NEVER:
                return ()
            if name.startswith(_SERVER.encode()) and name.isascii() and self.native.check([name.decode()]):
                return (name.decode(),)
            # A stranger has written there. It may have made such keys, too; any that stays will do.
            return tuple(key for key in self.list_keys() if key.startswith(f"{_SERVER}/"))
        except (dist.DistNetworkError, StoreLost):
            return ()  # the first real call says so

    def lose(self, why: str) -> None:
        self._lost = self._lost or why

    def read(self, key: str) -> bytes | None:
        raw = self.call(lambda: self.native.compare_set(key, _NEVER, _NEVER))
        return None if raw == _NEVER else raw

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return what there is. Torch's server answers for several keys at once only if all are there: of a longer list
        the halves are asked for, so that a few that are missing do not make it one request for each."""
        if self._batched and len(keys) > _ONE_BY_ONE:
            found = self.read_if_all(keys)
            if found is not None:
                return found
            half = len(keys) // 2
            return self.read_many(keys[:half]) + self.read_many(keys[half:])
        return [self.read(key) for key in keys]

    def read_if_all(self, keys: Sequence[str]) -> list[bytes | None] | None:
        """Return the entries of all keys; None if one is missing, in one request however many there are."""
        if not self._batched or len(keys) <= 2:
            return [self.read(key) for key in keys]
        if self.call(lambda: self.native.check(list(keys))):
            try:
                return list(self.call(lambda: self.native.multi_get(list(keys))))
            except dist.DistStoreError:
                pass  # a key vanished meanwhile
        return None

    def write(self, raws: Mapping[str, bytes], tick: bytes) -> None:
        self.send(lambda: self.native.multi_set([*raws, _TICK], [*raws.values(), tick]))

    def send(self, operation: Callable[[], object]) -> None:
        """Make a call that the server does not acknowledge, and then a harmless read: the server answers in order.
        Both are repeated on a new connection: what went into one that had ended is lost without a word."""

        def send_and_see() -> None:
            operation()
            self.native.compare_set(_TICK, _NEVER, _NEVER)

        self.call(send_and_see)

    def swap(self, key: str, expected: bytes | None, raw: bytes) -> bool:
        """Compare-and-set of raw entries; ``raw`` must be a distinct one."""
        return bool(self.call(lambda: self.native.compare_set(key, expected or b"", raw)) == raw)

    def tick(self, token: bytes) -> None:
        """Tell watches that something changed."""
        self.call(lambda: self.native.set(_TICK, token))

    def read_tick(self) -> bytes | None:
        return self.read(_TICK)

    def list_keys(self) -> list[str]:
        """Return all keys. One whose name is no text can only be a stranger's; torch cannot list any while it is
        there."""
        while True:
            try:
                return list(self.call(lambda: self.native.list_keys()))
            except UnicodeDecodeError as error:
                name: Any = error.object
                log.warning("deleted a key of %s whose name is no text: %r", self.address, name[:60])
                self.call(partial(self._delete_key, name))

    def _delete_key(self, key: Any) -> bool:
        return bool(self.native.delete_key(key))

    def delete(self, key: str) -> bool:
        return bool(self.call(lambda: self.native.delete_key(key)))

    def fork(self) -> Link:
        """Another connection to the same store."""
        if self._lost is not None:
            raise StoreLost(self._lost, address=self.address)
        other = self._fork()
        other._server = other._server or self._server
        return other


def _within(seconds: float, connect: Callable[[], Link]) -> Link | None:
    """Return the link, unless that fails or takes longer: torch's greeting waits for ever for a server that hangs."""
    made: list[Link] = []

    def run() -> None:
        with suppress(StoreLost):
            made.append(connect())

    thread = threading.Thread(target=run, name="phalanx-reconnect", daemon=True)
    thread.start()
    thread.join(seconds)
    return made[0] if made else None


def connect_link(host: str, port: int, *, timeout: float, is_up: bool = False) -> Link:
    """Connect to the TCPStore server at ``host:port``. ``is_up``: it was there, so a refusal is its end."""
    address = tcp_address(host, port)
    found = _wait_for_server(host, port, timeout, address, is_up)
    try:
        native = TCPStore(
            found,
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
    return Link(native, address, lambda: connect_link(host, port, timeout=1.0, is_up=True), batched=True)


def mark_server(native: Any) -> None:
    """Leave in a new server what tells it from every other."""
    key = f"{_SERVER}/{secrets.token_hex(16)}"
    native.set(key, b"1")
    native.set(_SERVER, key)


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _wait_for_server(host: str, port: int, timeout: float, address: str, is_up: bool) -> str:
    """Return the address of ``host`` at which the server answers. Torch's own connecting tries one address after the
    other, retries with growing pauses and logs; all are asked first, so that it stays short."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            connection, way = reach(host, port, max(0.05, left))
            connection.close()
            return way.address
        except Unreachable as error:
            if left <= 0.02 or (is_up and error.refused is not None):
                raise StoreLost(
                    f"cannot connect to the store {address} in {timeout:g} s: {error}", address=address
                ) from error
        time.sleep(0.02)


def bound_replies(port: int) -> None:
    """Give this process's sockets towards ``port`` a receive timeout: torch offers no handle on its own."""
    limit = struct.pack("ll", int(REPLY_TIMEOUT), int(REPLY_TIMEOUT % 1 * 1e6))
    for own in own_sockets():
        try:
            if own.getpeername()[1] == port:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        except (OSError, IndexError):
            continue  # not connected, or not of a kind that has a port
