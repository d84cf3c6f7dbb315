"""Simulates a regroup of any number of workers, event by event: what each asks of one store, in which order, and when.

Pure Python, no process and no socket. A worker is a generator that yields requests and pauses; the store is one server
that answers in the order of arrival. Which requests a worker makes is what ``_simulated_regroup`` counts of the real
ones; what a request costs is measured (``Costs``). What is assumed and what is left out is in docs/scale.md.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator
from dataclasses import dataclass

from phalanx.comm.stores._polling import pause_after


@dataclass(frozen=True, kw_only=True)
class Costs:
    """In seconds, but where another unit is named."""

    request: float = 20e-6
    """Of the server, for one request of one key."""
    key: float = 0.5e-6
    """Of the server, for one more key of a request."""
    client: float = 60e-6
    """Of a worker, for one request beside what the server takes."""
    member: float = 2e-6
    """Of a worker, to read one member of a list."""
    connect: float = 100e-6
    """Of a worker, to connect to one other."""
    one_way: float = 50e-6
    """From a worker's host to the store's, or back."""
    bytes_per_second: float = 1.1e9
    """Of the store's host: 10 Gbit/s."""


ID_BYTES, MEMBER_BYTES = 20, 75
"""Of one worker in the lists of a round and of a generation."""
READY_BYTES, PACKED_IDENTITY_BYTES = 300, 56
"""Of one worker as it writes that it is ready and who it is, and of the latter in the compressed list of all."""
ADDRESS_BYTES, PACKED_ADDRESS_BYTES = 150, 30
"""Of the same for gloo's addresses."""
PAIR_BYTES, PACKED_PAIR_BYTES = 8, 0.02
"""And what an address says of each other rank besides: the same row of numbers in all of them."""
UNPACKED_PER_SECOND = 5e8
"""Bytes that a worker takes out of a compressed list in a second."""


@dataclass(frozen=True)
class Ask:
    """One round trip: how long the server is busy with it, and how many bytes go over its wire."""

    busy: float
    num_bytes: int = 100


Steps = Generator["Ask | float", float, None]
"""Yields a request or a pause in seconds; is sent the time at which the server was done, or the pause ended."""


class Simulated:
    """One regroup after a loss: from the moment the next generation is agreed on to the last worker in its group."""

    def __init__(self, num_workers: int, costs: Costs, *, transport: str = "gloo") -> None:
        """``transport``: ``gloo`` (a host each) or ``shm`` (one host, no connections)."""
        self.num_workers = num_workers
        self.costs = costs
        self.transport = transport
        self.num_requests = 0
        self.num_bytes = 0
        self._written: dict[str, float] = {}
        """When a key was written."""
        self._counts: dict[str, int] = {}
        """How many of the keys that each worker writes are there."""
        self._busy_until = 0.0
        self._now = 0.0

    def run(self) -> float:
        """Return the seconds until the last worker has its place."""
        order = itertools.count()
        events: list[tuple[float, int, Steps, Ask | None]] = []
        workers = [self._worker(rank) for rank in range(self.num_workers)]
        for worker in workers:
            self._next(events, order, worker, None)
        last = 0.0
        while events:
            now, _, worker, ask = heapq.heappop(events)
            if ask is not None:  # it has arrived at the server
                self._busy_until = max(self._busy_until, now) + ask.busy + ask.num_bytes / self.costs.bytes_per_second
                self.num_requests += 1
                self.num_bytes += ask.num_bytes
                heapq.heappush(events, (self._busy_until + self.costs.one_way, next(order), worker, None))
                continue
            last = self._now = now
            self._next(events, order, worker, now)
        return last

    def _next(
        self,
        events: list[tuple[float, int, Steps, Ask | None]],
        order: itertools.count[int],
        worker: Steps,
        now: float | None,
    ) -> None:
        try:
            wanted = next(worker) if now is None else worker.send(now - self.costs.one_way)
        except StopIteration:
            return
        if isinstance(wanted, Ask):
            arrives = (now or 0.0) + self.costs.client + self.costs.one_way
            heapq.heappush(events, (arrives, next(order), worker, wanted))
        else:
            heapq.heappush(events, ((now or 0.0) + wanted, next(order), worker, None))

    # -- what a worker does, in the order of StoreCoordinator and of the group that it forms ------------------------

    def _worker(self, rank: int) -> Steps:
        n, costs = self.num_workers, self.costs
        yield from self._look(1, 100)  # that the generation is over
        yield from self._look(4, n * MEMBER_BYTES)
        yield from self._gather(rank, "ready", READY_BYTES, n * (ID_BYTES + PACKED_IDENTITY_BYTES), also_writes=1)
        yield 2 * n * costs.member
        if self.transport == "gloo":
            each = ADDRESS_BYTES + n * PAIR_BYTES
            packed = n * (PACKED_ADDRESS_BYTES + n * PACKED_PAIR_BYTES)
            yield from self._gather(rank, "addresses", each, int(packed))
            yield n * each / UNPACKED_PER_SECOND
            yield (n - 1) * costs.connect
        elif rank == 0:
            yield from self._write("segment")
        else:
            yield from self._await("segment", 100)  # that all have mapped it, they say in it

    def _look(self, num_keys: int, num_bytes: int) -> Steps:
        """One request for each, since some are not there; see ``Link.read_many``."""
        for index in range(num_keys):
            yield Ask(self.costs.request, num_bytes if index == 0 else 100)

    def _write(self, key: str = "", num_bytes: int = 100, *, also_writes: int = 0) -> Steps:
        """Two requests in one round trip: the write, of some keys more if told, and a read that acknowledges it."""
        at = yield Ask(2 * self.costs.request + also_writes * self.costs.key, num_bytes + 200)
        if key:
            self._written[key] = at

    def _gather(self, rank: int, what: str, each: int, listed: int, *, also_writes: int = 0) -> Steps:
        """Each writes its own record, the first reads all and writes one, which the others read."""
        yield from self._write(num_bytes=each, also_writes=also_writes)
        self._counts[what] = self._counts.get(what, 0) + 1
        if rank:
            yield from self._await(what, listed)
            return
        n, began = self.num_workers, self._now
        while True:
            is_there = self._counts[what] == n
            yield Ask(self.costs.request + n * self.costs.key, n * 60)  # whether all are there
            if is_there:
                break
            yield pause_after(self._now - began)
        yield Ask(self.costs.request + n * self.costs.key, n * (60 + each))
        yield n * self.costs.member
        yield from self._write(what, listed)

    def _await(self, key: str, num_bytes: int) -> Steps:
        began = self._now
        while True:
            is_there = key in self._written
            yield Ask(self.costs.request, num_bytes if is_there else 100)
            if is_there:
                return
            yield pause_after(self._now - began)
