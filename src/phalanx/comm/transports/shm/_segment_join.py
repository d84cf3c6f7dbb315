"""Lets the ranks of a group come to share a segment.

1. Rank 0 makes the segment and publishes in the store where it is (process, descriptor, nonce).
2. Every rank maps it and says so in the segment itself. When all have, rank 0 says there that the group stands, and
   closes the descriptor. A rank that cannot map it writes why into the store; as it never says that it has, the group
   does not form, and everybody raises ``ShmUnavailable`` with the first reason.

So a rank asks the store for one key. Before that, ``obstacle`` decides from the identities alone, the same on every
rank. A rank that dies in between is noticed by the others at once.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._polling import pause_after, slice_after
from phalanx.comm.transports.shm._peers import Peers
from phalanx.comm.transports.shm._segment import Segment, new_file, open_file_of
from phalanx.comm.transports.shm._segment_layout import SegmentLayout
from phalanx.comm.transports.shm._syscalls import unavailable
from phalanx.errors import CommError, PeerTimeout, StoreTimeout

Interrupt = Callable[[], "BaseException | None"]


class ShmUnavailable(CommError):
    """These ranks cannot share memory; the message says why. Raised on all of them, or on none."""


def obstacle(identities: Mapping[int, Identity]) -> str | None:
    """Why these ranks cannot share memory, in words, or None. Pure, so the same on every rank that sees the same.

    They must run under one kernel boot and pid namespace (peers are opened through ``/proc/<pid>``) and as one user
    (nobody else may map a segment).
    """
    first = identities[0]
    for rank, identity in sorted(identities.items()):
        if identity.machine != first.machine:
            return f"rank {rank} is on another machine or in another container than rank 0"
        if identity.uid != first.uid:
            return f"rank {rank} runs as user {identity.uid}, rank 0 as {first.uid}"
    return None


def exchange_identities(store: Store, rank: int, size: int, timeout: float) -> dict[int, Identity]:
    """For callers other than ``Group``, which knows its peers already."""
    store.set(f"member/{rank}", json.dumps(own_identity().to_record()).encode())
    records = store.wait([f"member/{r}" for r in range(size)], timeout)
    return {peer: Identity(**json.loads(record)) for peer, record in enumerate(records)}


class _Meeting:
    """The ranks of one forming group as one of them waits for the others."""

    def __init__(self, store: Store, peers: Peers, rank: int, timeout: float, interrupt: Interrupt | None) -> None:
        self._store, self._peers, self._rank = store, peers, rank
        self._timeout = timeout
        self._began = time.monotonic()
        self._interrupt = interrupt
        self._published: dict[str, bytes] = {}

    def publish(self, key: str, record: dict[str, object]) -> None:
        self._published[key] = json.dumps(record).encode()
        self._store.set(key, self._published[key])

    def await_record(self, key: str) -> dict[str, object]:
        """Return what rank 0 has published, and look out for deaths and interrupts meanwhile."""
        while True:
            try:
                (data,) = self._store.wait([key], slice_after(self._waited()))
                return dict(json.loads(data))
            except StoreTimeout:
                self._look([0])

    def give_up(self, trouble: str) -> NoReturn:
        """Tell the others that this rank does not map the segment: as it never says that it has, no group forms."""
        self._store.compare_and_set(_TROUBLE, None, f"rank {self._rank}: {trouble}".encode())
        self._hear_of_trouble()
        raise ShmUnavailable(trouble)

    def await_all(self, segment: Segment) -> None:
        """Return when all ranks have mapped the segment. They say so in it; the store is asked for trouble now and
        then."""
        looked = self._began
        while not segment.is_formed():
            missing = segment.unmapped()
            if self._rank == 0 and not missing:
                segment.say_formed()
                return
            now = time.monotonic()
            if now - looked > slice_after(self._waited()):
                looked = now
                self._hear_of_trouble()
                self._look(missing or [0])
            time.sleep(pause_after(self._waited()))

    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _hear_of_trouble(self) -> None:
        trouble = self._store.get(_TROUBLE)
        if trouble is not None:
            raise ShmUnavailable(trouble.decode(errors="replace"))

    def _look(self, missing: Sequence[int]) -> None:
        for key, data in self._published.items():
            if self._store.get(key) != data:
                self._store.set(key, data)  # a stranger wrote over it or deleted it
        cause = self._interrupt() if self._interrupt is not None else None
        if cause is not None:
            raise cause
        dead = self._peers.dead_among(range(len(self._peers.pids)))
        if dead:
            raise self._peers.lost(dead, "the group formed")
        if self._waited() >= self._timeout:
            raise PeerTimeout(
                f"rank {self._rank}: ranks {list(missing)} did not join the shared memory of generation "
                f"{self._peers.generation} within {self._timeout:g} s; they may hang",
                generation=self._peers.generation,
                ranks=tuple(missing),
            )


_TROUBLE = "trouble"


def join(
    store: Store,
    rank: int,
    layout: SegmentLayout,
    peers: Peers,
    *,
    timeout: float,
    interrupt: Interrupt | None = None,
) -> Segment:
    """Share a segment; collective. ``ShmUnavailable``, ``PeerLost`` or ``PeerTimeout`` when it comes to nothing."""
    meeting = _Meeting(store, peers, rank, timeout, interrupt)
    fd = -1
    try:
        if rank == 0:
            fd, where = _make(layout)
            meeting.publish("segment", where)
        else:
            where = meeting.await_record("segment")
        if where.get("trouble"):
            raise ShmUnavailable(f"rank 0: {where['trouble']}")
        segment, trouble = _map(where, layout, rank)
        if segment is None:
            meeting.give_up(trouble)
        segment.say_mapped()
        meeting.await_all(segment)
        return segment
    finally:
        if fd >= 0:
            os.close(fd)


def trial() -> str | None:
    """Why a segment cannot be made, opened by its process and mapped here, or None; nothing is left of it."""
    layout = SegmentLayout(size=2)
    fd, where = _make(layout)
    try:
        return str(where.get("trouble") or "") or _map(where, layout, 1)[1] or None
    finally:
        if fd >= 0:
            os.close(fd)


def _make(layout: SegmentLayout) -> tuple[int, dict[str, object]]:
    """Return a fresh segment: the descriptor to close in the end, and the record that tells the others where it is."""
    trouble = unavailable()
    if trouble is not None:
        return -1, {"trouble": trouble}
    try:
        fd = new_file(layout.total_bytes)
    except OSError as error:
        return -1, {"trouble": f"no shared memory: {error}"}
    nonce = secrets.randbits(62)
    Segment(fd, layout, 0).write_header(nonce)
    return fd, {"pid": os.getpid(), "fd": fd, "nonce": nonce}


def _map(where: dict[str, object], layout: SegmentLayout, rank: int) -> tuple[Segment | None, str]:
    """Map rank 0's segment; the second value says what went wrong, empty when nothing did."""
    trouble = unavailable()
    if trouble:
        return None, trouble
    pid = where["pid"]
    try:
        fd = open_file_of(int(str(pid)), int(str(where["fd"])))
    except OSError as error:
        return None, f"cannot open the segment of process {pid}: {error}"
    try:
        segment = Segment(fd, layout, rank)
    except (OSError, ValueError) as error:
        return None, f"cannot map the segment of process {pid}: {error}"
    finally:
        os.close(fd)
    return (
        (segment, "")
        if segment.header_fits(int(str(where["nonce"])))
        else (None, f"process {pid} shows another segment")
    )
