"""Measures a path between two machines, and answers who measures: latency, and bytes per second in both directions.

Owns the few messages that both ends speak, the measuring, and ``PathListener``, the other end. Plain sockets: what is
measured is the network, before any job or torch is there.

The listener is open to strangers as long as it runs, so it promises little and holds to it: it reads a fixed number of
bytes and closes the connection at the first that is not as expected; it keeps nothing of what it is sent; connections,
their time and their bytes are bounded; nothing that arrives ends it. Who does not speak these messages learns nothing.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx._reach import family_of

HELLO = b"phalanx-path-1\r\n"
_REQUEST = struct.Struct("!cI")
_COUNT = struct.Struct("!Q")
_ECHO, _TAKE, _GIVE, _ADDRESSES, _END = b"E", b"T", b"G", b"A", b"Q"
_MAX_ECHO, _MAX_BYTES, _MAX_ANSWER = 1024, 256 << 20, 1 << 16
_BLOCK = 1 << 18
_ROUNDS, _FIRST, _SPAN, _TRIES = 15, 1 << 18, 0.3, 3
"""Round trips whose median counts; bytes of the first transfer; seconds that the second should take."""

SESSION = 30.0
"""Seconds after which the listener ends a connection."""
MAX_CONNECTIONS = 8


class NotAListener(OSError):
    """Something else than ``phalanx doctor --listen`` answered."""


@dataclass(frozen=True)
class PathSpeed:
    """What a path can do: the median round trip in seconds, bytes per second to the other end and from it."""

    latency: float
    sent: float
    received: float


class _Talk:
    """A connection with a last moment: no call waits beyond it."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def _wait_no_longer(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this connection is over")
        self._connection.settimeout(left)

    def send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._wait_no_longer()
            left = left[self._connection.send(left) :]

    def read(self, count: int) -> bytes:
        parts = []
        while count:
            self._wait_no_longer()
            part = self._connection.recv(min(count, _BLOCK))
            if not part:
                raise ConnectionResetError("the other end closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def skip(self, count: int) -> None:
        room = memoryview(bytearray(_BLOCK))
        while count:
            self._wait_no_longer()
            got = self._connection.recv_into(room, min(count, _BLOCK))
            if not got:
                raise ConnectionResetError("the other end closed the connection")
            count -= got

    def fill(self, count: int) -> None:
        block = bytes(_BLOCK)
        while count:
            self.send(memoryview(block)[: min(count, _BLOCK)])
            count -= min(count, _BLOCK)


# -- who measures ---------------------------------------------------------------------------------------------------


class PathProbe:
    """One end of a connection to a ``PathListener``; closes it at the end of the block."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        """Greet the other end; ``NotAListener`` if it is something else."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._talk = _Talk(connection, time.monotonic() + timeout)
        try:
            self._talk.send(HELLO)
            answer = self._talk.read(len(HELLO))
        except OSError as error:
            connection.close()
            raise NotAListener(f"it does not answer as `phalanx doctor --listen` does ({error})") from error
        if answer != HELLO:
            connection.close()
            raise NotAListener(f"it answers {answer!r}, which `phalanx doctor --listen` does not")

    def __enter__(self) -> PathProbe:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._talk.send(_REQUEST.pack(_END, 0))
        except OSError:
            pass
        self._connection.close()

    def addresses(self) -> list[str]:
        """Return the addresses at which the other end listens too, by its own word; checked by trying them only."""
        self._talk.send(_REQUEST.pack(_ADDRESSES, 0))
        (size,) = _COUNT.unpack(self._talk.read(_COUNT.size))
        if size > _MAX_ANSWER:
            raise NotAListener(f"it wants to tell {size} bytes of addresses")
        found = json.loads(self._talk.read(size))
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise NotAListener("it tells no list of addresses")
        return found

    def measure(self) -> PathSpeed:
        """Return latency and rates; takes about a second on any path."""
        return PathSpeed(self._latency(), self._rate(self._send), self._rate(self._receive))

    def _latency(self) -> float:
        seconds = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            self._talk.send(_REQUEST.pack(_ECHO, 8) + bytes(8))
            self._talk.read(8)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def _rate(self, move: Callable[[int], None]) -> float:
        """Bytes per second of a transfer that is long enough to tell; how long, a short one says."""
        count, rate = _FIRST, 0.0
        for _ in range(_TRIES):
            began = time.perf_counter()
            move(count)
            taken = max(time.perf_counter() - began, 1e-6)
            rate = count / taken
            if taken >= _SPAN / 2:
                break
            count = min(_MAX_BYTES, max(_FIRST, int(rate * _SPAN)))
        return rate

    def _send(self, count: int) -> None:
        self._talk.send(_REQUEST.pack(_TAKE, count))
        self._talk.fill(count)
        if _COUNT.unpack(self._talk.read(_COUNT.size)) != (count,):
            raise NotAListener("it did not get what it was sent")

    def _receive(self, count: int) -> None:
        self._talk.send(_REQUEST.pack(_GIVE, count))
        self._talk.skip(count)


# -- who answers ----------------------------------------------------------------------------------------------------


class PathListener:
    """Answers probes at ``host:port`` from threads of its own, until ``close``.

    >>> with PathListener("127.0.0.1", 0) as listener:                        # doctest: +SKIP
    ...     connection = socket.create_connection(listener.address)
    ...     with PathProbe(connection, 10.0) as probe:
    ...         probe.measure()
    """

    def __init__(self, host: str, port: int, addresses: Sequence[str] = (), *, session: float = SESSION) -> None:
        """``addresses``: what to tell who asks where else it listens."""
        both = host == "::" and socket.has_dualstack_ipv6()  # all interfaces, by either protocol
        self._server = socket.create_server((host, port), family=family_of(host), backlog=16, dualstack_ipv6=both)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._told = json.dumps(list(addresses)).encode()
        self._session = session
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._is_closed = False
        self._lock = threading.Lock()
        self.num_answered = 0
        self.num_refused = 0
        self._thread = threading.Thread(target=self._accept, name="phalanx-path-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> PathListener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # wakes accept
        except OSError:
            pass
        self._server.close()
        self._thread.join(5.0)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # out of descriptors, say: who is connected will go
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                self._count(answered=False)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="phalanx-path", daemon=True).start()
            except RuntimeError:  # no more threads just now
                self._places.release()
                connection.close()
                self._count(answered=False)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(_Talk(connection, time.monotonic() + self._session))
            self._count(answered=True)
        except (OSError, ValueError):
            self._count(answered=False)  # a stranger, or one who went away: nobody else's business
        finally:
            self._places.release()

    def _count(self, *, answered: bool) -> None:
        with self._lock:
            self.num_answered += answered
            self.num_refused += not answered

    def _answer(self, talk: _Talk) -> None:
        if talk.read(len(HELLO)) != HELLO:
            raise ValueError("not a probe")
        talk.send(HELLO)
        left = 2 * _TRIES * _MAX_BYTES + _ROUNDS * _MAX_ECHO  # what the quickest path takes: both ways, every try
        while True:
            kind, count = _REQUEST.unpack(talk.read(_REQUEST.size))
            left -= count
            if kind == _END:
                return
            if kind == _ECHO and count <= _MAX_ECHO:
                talk.send(talk.read(count))
            elif kind == _TAKE and count <= _MAX_BYTES and left >= 0:
                talk.skip(count)
                talk.send(_COUNT.pack(count))
            elif kind == _GIVE and count <= _MAX_BYTES and left >= 0:
                talk.fill(count)
            elif kind == _ADDRESSES and count == 0:
                talk.send(_COUNT.pack(len(self._told)) + self._told)
            else:
                raise ValueError("no such request")
