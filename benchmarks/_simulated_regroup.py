"""Regroups W workers that are threads of this process, with the agents' part written by a script, and counts requests.

What is under test is what real workers run: ``StoreCoordinator`` and the group that it forms, each with a client of the
store that counts. Nobody computes, so there is no model and no step. Three ways to regroup: ``loss`` (the agents form a
generation without a worker that is gone), ``survivors`` (one host, those who live go on by themselves) and ``newcomer``
(one more worker gets its place at a step boundary).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from benchmarks._counted_store import PATIENCE, CountedStore, Requests
from phalanx import protocol
from phalanx.comm.stores import MemoryStore, Store
from phalanx.comm.transports.shm import _segment_join
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.membership._store_coordinator import StoreCoordinator
from phalanx.errors import PeerLost
from phalanx.protocol import JobKeys, Ready

WAYS = ("loss", "survivors", "newcomer")
LIMIT = 300.0


@dataclass(frozen=True)
class Regroup:
    """What the workers asked from the loss of their group to their place in the next one, and how long it took."""

    requests: tuple[Requests, ...]
    """In the order of their ranks."""
    seconds: float


@contextmanager
def _unhurried() -> Iterator[None]:
    """Who waits for others to map a segment looks at the store in between as often as it takes long: never here."""
    before = _segment_join.slice_after
    _segment_join.slice_after = lambda waited: PATIENCE
    try:
        yield
    finally:
        _segment_join.slice_after = before


class _Mourning:
    """A group of which a rank counts as dead: threads of one process do not die by themselves."""

    def __init__(self, group: Any, dead: int) -> None:
        self._group = group
        self._dead = dead

    def dead_ranks(self) -> tuple[int, ...]:
        return (self._dead,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class SimulatedJob:
    """The store, the script's part of the agents', and the workers."""

    def __init__(self, num_workers: int, store: Store | None = None, *, patient: bool) -> None:
        self.ids = tuple(f"node{number:04d}.0.0" for number in range(num_workers))
        self._root = store or MemoryStore()
        self._keys = self._root.namespace(protocol.job_prefix("scale"))
        self._patient = patient
        self._workers = {worker: Requests() for worker in self.ids}
        self._errors: list[BaseException] = []

    def agree(self, generation: int, workers: Sequence[str]) -> None:
        nodes = tuple(
            protocol.MemberNode(worker.split(".")[0], 1, "host", "10.0.0.1", 29500, 1, worker_ids=(worker,))
            for worker in workers
        )
        self._keys.set(protocol.members_key(generation), protocol.Members(generation, nodes).to_json())

    def run(self, way: str) -> Regroup:
        """Regroup once; ``way`` is one of ``WAYS``."""
        with _unhurried() if self._patient else nullcontext():
            return self._run(way)

    def _run(self, way: str) -> Regroup:
        absent = self.ids[-1:] if way == "newcomer" else ()
        first = [worker for worker in self.ids if worker not in absent]
        remain = self.ids if way == "newcomer" else (self.ids[0], *self.ids[2:])
        gates = {name: threading.Barrier(len(first) + 1) for name in ("formed", "go")}
        took: dict[str, float] = {}
        self.agree(0, first)
        rejoin = {"loss": self._after_loss, "survivors": self._as_survivor, "newcomer": self._at_boundary}[way]
        stay = threading.Barrier(len(remain))

        def old(worker: str) -> None:
            coordinator = self._coordinator(worker)
            membership = coordinator.join(Ready())
            coordinator._stop_watching()
            for name in ("formed", "go"):
                gates[name].wait(LIMIT)
                self._workers[worker].clear()
            if worker in remain:
                found = rejoin(coordinator, membership)
                arrive(worker, coordinator, found)

        def new(worker: str) -> None:
            coordinator = self._coordinator(worker, generation=1)
            self._workers[worker].clear()
            arrive(worker, coordinator, coordinator.join(Ready()))

        def arrive(worker: str, coordinator: StoreCoordinator, found: Membership) -> None:
            coordinator._stop_watching()
            took[worker] = time.monotonic()
            assert set(found.workers) == set(remain), found.workers
            stay.wait(LIMIT)
            coordinator.close()
            if found.group is not None:
                found.group.close()

        threads = [self._start(old, worker) for worker in first]
        gates["formed"].wait(LIMIT)
        self._prepare(way, first, remain)
        threads += [self._start(new, worker) for worker in absent]
        self._keys.wait([JobKeys().ready(1, worker) for worker in absent], LIMIT)  # else it gets the place after next
        gates["go"].wait(LIMIT)
        began = time.monotonic()
        for thread in threads:
            thread.join(LIMIT)
        if self._errors:
            raise self._errors[0]
        assert set(took) == set(remain), f"only {len(took)} of {len(remain)} workers have a place"
        return Regroup(tuple(self._workers[worker] for worker in remain), max(took.values()) - began)

    def _prepare(self, way: str, first: Sequence[str], remain: Sequence[str]) -> None:
        """What the agents write: for one who follows them it is there, so that nobody is counted looking for it."""
        if way == "survivors":
            return
        lost = tuple(worker for worker in first if worker not in remain)
        reason = protocol.Broken(reason="the script says so", workers=lost).to_json()
        self._keys.set(protocol.broken_key(0) if way == "loss" else protocol.wanted_key(0), reason)
        self.agree(1, remain)

    def _start(self, main: Callable[[str], None], worker: str) -> threading.Thread:
        def guarded() -> None:
            try:
                main(worker)
            except BaseException as error:
                self._errors.append(error)
                raise

        thread = threading.Thread(target=guarded, name=worker, daemon=True)
        thread.start()
        return thread

    def _coordinator(self, worker: str, generation: int = 0) -> StoreCoordinator:
        store = CountedStore(self._root.clone(), self._workers[worker], patient=self._patient)
        return StoreCoordinator(store, "scale", worker, generation, timeout=LIMIT, comm_timeout=LIMIT)

    def _after_loss(self, coordinator: StoreCoordinator, membership: Membership) -> Membership:
        cause = PeerLost("a worker is gone", generation=0)
        return coordinator.join_after_loss(membership, Ready(step=7, peers=membership.workers), cause)

    def _as_survivor(self, coordinator: StoreCoordinator, membership: Membership) -> Membership:
        group: Any = _Mourning(membership.group, 1)
        return self._after_loss(coordinator, replace(membership, group=group))

    def _at_boundary(self, coordinator: StoreCoordinator, membership: Membership) -> Membership:
        return coordinator.join_at_boundary(membership, Ready(step=7, peers=membership.workers))
