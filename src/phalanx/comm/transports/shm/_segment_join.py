"""Lets the ranks of a group come to share a segment: two rounds over the store, alike on every rank.

1. Rank 0 makes the segment and publishes where it is (process, descriptor, nonce).
2. Every rank maps it and publishes how that went. Rank 0 reads what all have published and publishes the outcome: if
   all is well the group stands and it closes the descriptor; otherwise everybody raises ``ShmUnavailable`` with the
   first reason. Every rank but the first waits for one key in each round.

Before that, ``obstacle`` decides from the identities alone, the same on every rank. A rank that dies in between is
noticed by the others at once.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from phalanx.comm.failure._liveness import Identity, own_identity
from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._polling import slice_after
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


class _JoinRounds:
    """The store as the ranks of one forming group use it."""

    def __init__(self, store: Store, peers: Peers, rank: int, timeout: float, interrupt: Interrupt | None) -> None:
        self._store, self._peers, self._rank = store, peers, rank
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._interrupt = interrupt
        self._published: dict[str, bytes] = {}

    def publish(self, key: str, record: dict[str, object]) -> None:
        self._published[key] = json.dumps(record).encode()
        self._store.set(key, self._published[key])

    def collect(self, names: Sequence[str], awaited: dict[int, str]) -> list[dict[str, object]]:
        """Return what was published under ``names``, and look out for deaths and interrupts meanwhile. ``awaited``: the
        keys of the ranks that it takes."""
        while True:
            waited = time.monotonic() + self._timeout - self._deadline
            try:
                return [json.loads(data) for data in self._store.wait(names, slice_after(waited))]
            except StoreTimeout:
                for key, data in self._published.items():
                    if self._store.get(key) != data:
                        self._store.set(key, data)  # a stranger wrote over it or deleted it
                self._look(awaited)

    def _look(self, awaited: dict[int, str]) -> None:
        cause = self._interrupt() if self._interrupt is not None else None
        if cause is not None:
            raise cause
        dead = self._peers.dead_among(list(awaited))
        if dead:
            raise self._peers.lost(dead, "the group formed")
        if time.monotonic() >= self._deadline:
            found = self._store.get_many(list(awaited.values()))
            missing = [rank for rank, data in zip(awaited, found, strict=True) if data is None] or [0]
            raise PeerTimeout(
                f"rank {self._rank}: ranks {list(missing)} did not join the shared memory of generation "
                f"{self._peers.generation} within {self._timeout:g} s; they may hang",
                generation=self._peers.generation,
                ranks=tuple(missing),
            )


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
    meeting = _JoinRounds(store, peers, rank, timeout, interrupt)
    fd = -1
    try:
        if rank == 0:
            fd, where = _make(layout)
            meeting.publish("segment", where)
        else:
            where = meeting.collect(["segment"], {0: "segment"})[0]
        segment, trouble = _map(where, layout, rank)
        meeting.publish(f"mapped/{rank}", {"trouble": trouble})
        mapped = {r: f"mapped/{r}" for r in range(layout.size)}
        if rank == 0:
            answers = [answer["trouble"] for answer in meeting.collect(list(mapped.values()), mapped)]
            outcome = next((f"rank {other}: {said}" for other, said in enumerate(answers) if said), "")
            meeting.publish("outcome", {"trouble": outcome})
        else:
            outcome = str(meeting.collect(["outcome"], mapped)[0]["trouble"])
        if outcome:
            raise ShmUnavailable(outcome)
        assert segment is not None, "no trouble means a segment"
        return segment
    finally:
        if fd >= 0:
            os.close(fd)


def trial() -> str | None:
    """Why a segment cannot be made, opened by its process and mapped here, or None; nothing is left of it."""
    layout = SegmentLayout(size=2)
    fd, where = _make(layout)
    try:
        return _map(where, layout, 1)[1] or None
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
    trouble = unavailable() or str(where.get("trouble", ""))
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
