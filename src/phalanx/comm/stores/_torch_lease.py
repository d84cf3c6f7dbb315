"""Adds leases to torch's TCPStore, which has none: heartbeats, judged by one clock next to the server.

Guarantees: a lease ends ``ttl`` seconds (plus one look, ``LOOK``) after its last heartbeat was seen, also
for a reader that arrives later, because the keys are really gone; no clock of another host takes part. A
lease that ended never comes back: beat and end are compare-and-sets of the same entry, so exactly one of
them wins. The owner of a key that changed hands in between keeps it: entries are distinct (see
``_stored_value``). Assumptions: the process that hosts the server runs the ``Reaper`` (``TCPStore.serve``
starts it). A pause of that process (SIGSTOP, a swapped-out host) is not held against the owners, who could
not reach it meanwhile. What strangers write into the book-keeping is named, ignored and put right; they can end a lease
(its owner then takes another one), and keep one alive for as long as they write.
Rejected: readers that judge by themselves (one that arrives late has to wait a
whole ttl); expiry times in wall clock (skew between hosts).
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from phalanx.comm._background import Background
from phalanx.comm.stores._complaints import Complaints, clipped
from phalanx.comm.stores._interface import Lease
from phalanx.comm.stores._stored_value import Writer, decode
from phalanx.comm.stores._torch_link import Link
from phalanx.errors import StoreError, StoreLost

log = logging.getLogger(__name__)

_CHANCE = random.SystemRandom()  # not the global generator: that one belongs to the training script

LOOK = 0.05
"""Seconds between two looks of the reaper."""

GRAVE = 60.0
"""Seconds that a finished lease is still swept: its owner may be in the middle of one last ``set``."""

VALUES = "v/"
_NEW, _REAPER, _ENDED = "p/new", "p/reaper", b"ended"
_LONGEST = 7 * 24 * 3600.0


def _beat_key(lease: int) -> str:
    return f"p/beat/{lease}"


def _keys_key(lease: int) -> str:
    return f"p/keys/{lease}"


@dataclass
class _HeldLease:
    ttl: float
    beat: bytes | None
    deadline: float


class LeaseTable:
    """Which leases have run out: pure bookkeeping over observed heartbeats and a clock that is passed in."""

    def __init__(self) -> None:
        self._entries: dict[int, _HeldLease] = {}
        self._looked: float | None = None

    def ids(self) -> list[int]:
        return list(self._entries)

    def start(self, lease: int, ttl: float, now: float) -> None:
        self._entries[lease] = _HeldLease(ttl, None, now + ttl)

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
    for name in keys_of(listed):
        key = VALUES + name
        record = decode(link.read(key))
        if record.lease == lease and link.swap(key, record.raw, writer.tombstone()):
            link.tick(writer.encode(b""))


def keys_of(listed: bytes) -> set[str]:
    """Return the keys in a lease's list; lines that are none are not its owner's.

    >>> keys_of(b'"a/b"\\n7\\nnonsense\\n')
    {'a/b'}
    """
    keys = set()
    for line in set(listed.splitlines()):
        try:
            key = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(key, str) and key.isprintable():
            keys.add(key)
    return keys


def parse_new(item: bytes) -> tuple[int, float] | None:
    """Return a lease and its time-to-live from the queue of new ones; None when it is not what an owner puts there.

    >>> parse_new(b"[7, 2.5]"), parse_new(b"[7]"), parse_new(b"[7, NaN]")
    ((7, 2.5), None, None)
    """
    try:
        lease, ttl = json.loads(item)
    except (ValueError, TypeError, RecursionError):
        return None
    if type(lease) is not int or not 0 < lease < 2**63 or type(ttl) not in (int, float):
        return None
    return (lease, float(ttl)) if 0 < ttl <= _LONGEST else None


class Reaper:
    """The thread beside the server that ends leases. One per server."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._writer = Writer()
        self._table = LeaseTable()
        self._graves: dict[int, float] = {}
        self._stop = threading.Event()
        self._complaints = Complaints(log)
        self._say_present()
        self._thread = Background(
            self._run, "phalanx-lease-reaper", on_failure=self._end, attempts=100, stop=self._stop
        )
        self._thread.start()

    def _say_present(self) -> None:
        self._link.write({_REAPER: b"1"}, self._writer.encode(b""))

    def _end(self, error: BaseException) -> None:
        """Nobody ends leases any more: no new ones may begin, so that whoever asks for one hears of it."""
        log.error("no lease at %s will end any more: %r", self._link.address, error)
        try:
            self._link.delete(_REAPER)
        except StoreLost:
            pass  # the server is gone, and with it every lease

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
                    if self._link.read(_REAPER) is None:
                        self._say_present()  # a stranger deleted it
                    next_sweep = now + 1.0
            except StoreLost:
                return  # the server is gone, and with it every lease

    def _look(self) -> None:
        link = self._link
        while link.call(lambda: link.native.queue_len(_NEW)):
            try:
                item = link.call(lambda: link.native.queue_pop(_NEW, False), repeat=False)
            except dist.QueueEmptyError:
                break
            new = parse_new(item)
            if new is None or new[0] in self._table.ids() or new[0] in self._graves:
                self._complaints.say(_NEW, f"refused a lease at {link.address}: {clipped(item)}")
                continue
            self._table.start(*new, time.monotonic())
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
        self._beat = b"1"
        self._writer = Writer()
        if link.read(_REAPER) is None:
            raise StoreError(f"{link.address} keeps no leases: host the server with TCPStore.serve")
        self.id = _CHANCE.randrange(1, 2**62)
        link.send(lambda: link.native.set(_beat_key(self.id), self._beat))
        link.send(lambda: link.native.queue_push(_NEW, json.dumps([self.id, ttl])))

    def refresh(self) -> bool:
        with self._lock:
            following = b"%d" % (int(self._beat) + 1)
            if not self._link.swap(_beat_key(self.id), self._beat, following):
                standing = self._link.read(_beat_key(self.id))
                if standing in (None, _ENDED) or not self._link.swap(_beat_key(self.id), standing, following):
                    return False
                log.warning("lease %d at %s: put a stranger's %r right", self.id, self.address, standing)
            self._beat = following
            return True

    def revoke(self) -> None:
        with self._lock:
            # A False here means that it has ended already; sweeping once more is harmless.
            self._link.swap(_beat_key(self.id), self._beat, _ENDED)
        sweep(self._link, self._writer, self.id)

    def bind(self, key: str, value: bytes) -> None:
        """Write ``key`` bound to this lease. Listed first, so that the reaper finds it whenever we die."""
        self._check_running(key)
        line = json.dumps(key) + "\n"
        self._link.send(lambda: self._link.native.append(_keys_key(self.id), line))
        raw = self._writer.encode(value, self.id)
        self._link.write({VALUES + key: raw}, self._writer.encode(b""))
        try:
            self._check_running(key)  # else the reaper may have looked before the key was there
        except StoreError:
            sweep(self._link, self._writer, self.id)
            raise

    def _check_running(self, key: str) -> None:
        if self._link.read(_beat_key(self.id)) in (None, _ENDED):
            raise StoreError(f"cannot set {key!r} in {self.address}: its lease of {self.ttl:g} s has run out")
