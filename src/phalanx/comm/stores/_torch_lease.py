"""Leases over torch's TCPStore, which has none: heartbeats, judged by one clock next to the server.

Guarantees: a lease ends ``ttl`` seconds (plus one look, ``LOOK``) after its last heartbeat was seen, also
for a reader that arrives later, because the keys are really gone; no clock of another host takes part. A
lease that ended never comes back: beat and end are compare-and-sets of the same entry, so exactly one of
them wins. The owner of a key that changed hands in between keeps it: entries are distinct (see
``_record``). Assumptions: the process that hosts the server runs the ``Reaper`` (``TCPStore.serve``
starts it). A pause of that process (SIGSTOP, a swapped-out host) is not held against the owners, who could
not reach it meanwhile. Rejected: readers that judge by themselves (one that arrives late has to wait a
whole ttl); expiry times in wall clock (skew between hosts).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from phalanx.comm.stores._interface import Lease
from phalanx.comm.stores._record import Writer, decode
from phalanx.comm.stores._torch_link import Link
from phalanx.errors import StoreError, StoreLost

LOOK = 0.05
"""Seconds between two looks of the reaper."""

GRAVE = 60.0
"""Seconds that a finished lease is still swept: its owner may be in the middle of one last ``set``."""

VALUES = "v/"
_NEW, _COUNT, _REAPER, _ENDED = "p/new", "p/leases", "p/reaper", b"ended"


def _beat_key(lease: int) -> str:
    return f"p/beat/{lease}"


def _keys_key(lease: int) -> str:
    return f"p/keys/{lease}"


@dataclass
class _Entry:
    ttl: float
    beat: bytes | None
    deadline: float


class LeaseTable:
    """Which leases have run out: pure bookkeeping over observed heartbeats and a clock that is passed in."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._looked: float | None = None

    def ids(self) -> list[int]:
        return list(self._entries)

    def start(self, lease: int, ttl: float, now: float) -> None:
        self._entries[lease] = _Entry(ttl, None, now + ttl)

    def forget(self, lease: int) -> None:
        del self._entries[lease]

    def observe(self, beats: Mapping[int, bytes | None], now: float) -> list[int]:
        """Take in the heartbeats of all leases; the leases that are due to end."""
        pause = 0.0 if self._looked is None else max(0.0, now - self._looked - 4 * LOOK)
        self._looked = now
        due = []
        for lease, entry in self._entries.items():
            beat = beats[lease]
            if beat is None or beat == _ENDED:
                due.append(lease)
            elif beat != entry.beat:
                entry.beat, entry.deadline = beat, now + entry.ttl
            else:
                entry.deadline += pause
                if entry.deadline <= now:
                    due.append(lease)
        return due


def sweep(link: Link, writer: Writer, lease: int) -> None:
    """Turn every key that is still bound to ``lease`` into a tombstone."""
    listed = link.read(_keys_key(lease)) or b""
    for line in set(listed.splitlines()):
        key = VALUES + json.loads(line)
        record = decode(link.read(key))
        if record.lease == lease and link.swap(key, record.raw, writer.tombstone()):
            link.tick(writer.encode(b""))


class Reaper:
    """The thread beside the server that ends leases. One per server."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._writer = Writer()
        self._table = LeaseTable()
        self._graves: dict[int, float] = {}
        self._stop = threading.Event()
        link.write(_REAPER, b"1", self._writer.encode(b""))
        self._thread = threading.Thread(target=self._run, name="phalanx-lease-reaper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        next_sweep = 0.0
        while not self._stop.wait(LOOK):
            try:
                self._look()
                now = time.monotonic()
                if now >= next_sweep:
                    self._sweep_graves(now)
                    next_sweep = now + 1.0
            except StoreLost:
                return  # the server is gone, and with it every lease

    def _look(self) -> None:
        link = self._link
        while link.call(lambda: link.native.queue_len(_NEW)):
            try:
                lease, ttl = json.loads(link.call(lambda: link.native.queue_pop(_NEW, False), repeat=False))
            except dist.QueueEmptyError:
                break
            self._table.start(lease, ttl, time.monotonic())
        ids = self._table.ids()
        if not ids:
            return
        beats = dict(zip(ids, link.read_many([_beat_key(lease) for lease in ids]), strict=True))
        # After reading: no beat is older than it looks then, and one that came since wins the swap.
        now = time.monotonic()
        for lease in self._table.observe(beats, now):
            if beats[lease] in (None, _ENDED) or link.swap(_beat_key(lease), beats[lease], _ENDED):
                self._table.forget(lease)
                self._graves[lease] = now + GRAVE
                sweep(link, self._writer, lease)

    def _sweep_graves(self, now: float) -> None:
        for lease, until in list(self._graves.items()):
            sweep(self._link, self._writer, lease)
            if now >= until:
                del self._graves[lease]
                for key in (_keys_key(lease), _beat_key(lease)):
                    self._link.delete(key)


class TorchLease(Lease):
    """A lease of a ``TCPStore``; made by ``lease()``."""

    def __init__(self, link: Link, ttl: float) -> None:
        self.ttl = ttl
        self.address = link.address
        self._link = link
        self._lock = threading.Lock()
        self._beats = 1
        self._writer = Writer()
        if link.read(_REAPER) is None:
            raise StoreError(f"{link.address} keeps no leases: host the server with TCPStore.serve")
        self.id = link.add(_COUNT, 1)
        link.send(lambda: link.native.set(_beat_key(self.id), b"1"))
        link.send(lambda: link.native.queue_push(_NEW, json.dumps([self.id, ttl])))

    def refresh(self) -> bool:
        with self._lock:
            beat, following = b"%d" % self._beats, b"%d" % (self._beats + 1)
            if not self._link.swap(_beat_key(self.id), beat, following):
                return False
            self._beats += 1
            return True

    def revoke(self) -> None:
        with self._lock:
            # A False here means that it has ended already; sweeping once more is harmless.
            self._link.swap(_beat_key(self.id), b"%d" % self._beats, _ENDED)
        sweep(self._link, self._writer, self.id)

    def bind(self, key: str, value: bytes) -> None:
        """Write ``key`` bound to this lease. Listed first, so that the reaper finds it whenever we die."""
        self._check_running(key)
        line = json.dumps(key) + "\n"
        self._link.send(lambda: self._link.native.append(_keys_key(self.id), line))
        raw = self._writer.encode(value, self.id)
        self._link.write(VALUES + key, raw, self._writer.encode(b""))
        try:
            self._check_running(key)  # else the reaper may have looked before the key was there
        except StoreError:
            sweep(self._link, self._writer, self.id)
            raise

    def _check_running(self, key: str) -> None:
        if self._link.read(_beat_key(self.id)) in (None, _ENDED):
            raise StoreError(f"cannot set {key!r} in {self.address}: its lease of {self.ttl:g} s has run out")
