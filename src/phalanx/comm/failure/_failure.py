"""Tells what a transport's error means: which peer is gone, which one is late, or neither.

Owns the one cause of a group's end. Evidence, strongest first: what this process was told (``abort``), processes of
this machine that are dead or stopped, what another rank wrote into the store before it closed its connections, the
words of the backend's error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx._fields import Fields, load_json
from phalanx.comm.failure._liveness import Identity, forget_deaths, watch_deaths
from phalanx.comm.failure._peer_addresses import rank_named
from phalanx.errors import CommError, PeerLost, PeerTimeout, StoreError

if TYPE_CHECKING:
    from phalanx.comm.stores import Store

FAILURE_KEY = "failure"
LINGER = 0.15
"""Seconds for which a rank that lost a connection keeps the others: so long, who lost one names whom it really lost."""
_LATE_WORDS = ("timed out", "timeout", "time out")
_CLOSED_WORDS = ("connection", "broken pipe", "socket")
_FAULT_WORDS = (
    *_LATE_WORDS,
    *_CLOSED_WORDS,
    "peer",
    "gloo",
    "nccl",
    "reset",
    "aborted",
    "shutdown",
)


def _given_up_key(rank: int) -> str:
    return f"given-up/{rank}"


class FailureDetector:
    """Finds and keeps the cause of a group's end; thread-safe, settled once."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        generation: int = 0,
        timeout: float,
        peers: dict[int, Identity] | None = None,
        store: Store | None = None,
    ) -> None:
        self.cause: BaseException | None = None
        self._rank = rank
        self._size = size
        self._generation = generation
        self._timeout = timeout
        self._peers = {r: identity for r, identity in (peers or {}).items() if r != rank}
        self._store = store
        self._lock = threading.Lock()
        self._on_death: Callable[[], None] | None = None
        self._watched: list[int] = []

    def start(self, on_death: Callable[[], None]) -> None:
        """Watch the peers of this machine from now on."""
        self._on_death = on_death
        for rank, identity in self._peers.items():
            if watch_deaths(identity, self._died):
                self._watched.append(rank)

    def stop(self) -> None:
        self._on_death = None
        watched, self._watched = self._watched, []
        for rank in watched:
            forget_deaths(self._peers[rank], self._died)

    def _died(self, identity: Identity) -> None:
        callback = self._on_death
        if callback is not None:
            callback()

    @staticmethod
    def is_fault(error: BaseException) -> bool:
        """Return whether a backend's error speaks of the network or the peers rather than of a wrong argument."""
        text = str(error).lower()
        return isinstance(error, CommError) or any(word in text for word in _FAULT_WORDS)

    def settle_as(self, cause: BaseException) -> BaseException:
        """Keep ``cause`` unless there is one already; the one that holds."""
        with self._lock:
            if self.cause is None:
                self.cause = cause
            return self.cause

    def settle(self, error: BaseException | None) -> BaseException:
        """Find out why ``error`` came (None: a peer's death was noticed), tell the others, keep it."""
        with self._lock:
            if self.cause is None:
                self.cause = self._find(error)
            return self.cause

    def timed_out(self, timeout: float) -> PeerTimeout:
        """Return the error for a ``wait`` with a timeout of its own; the group lives on."""
        return self._late(timeout)

    def _find(self, error: BaseException | None) -> BaseException:
        if isinstance(error, CommError):
            return error
        text = "" if error is None else str(error)
        late = any(word in text.lower() for word in _LATE_WORDS)
        dead = self._dead_ranks(patience=0.0 if late else 0.05)
        if dead:
            return self._lost(dead)
        if late:
            cause = self._late(self._timeout)
            self._publish("timeout", cause.ranks)
            return cause
        told = self._told()
        if told is not None:
            return told
        closed = any(word in text.lower() for word in _CLOSED_WORDS)
        if closed and self._stopped_ranks():  # whoever closed had given up on it, but had no time yet to say so
            return self._late(self._timeout)
        detail = f" ({text.splitlines()[0][:160]})" if text else ""
        named = None if self._store is None else rank_named(text, self._store, self._size)
        who = "a peer" if named is None else f"rank {named}"
        if named is not None and self._has_given_up(named):
            return PeerLost(
                f"rank {self._rank}: {who} of generation {self._generation} closed its connection, since it had lost "
                "that of another; regroup",
                generation=self._generation,
            )
        return PeerLost(
            f"rank {self._rank}: {who} of generation {self._generation} closed its connection{detail}; "
            f"regroup without it, or see its log for why it left",
            generation=self._generation,
            suspects=() if named is None else (named,),
        )

    def give_up(self) -> None:
        """Say that this rank's connections will close, and not for a fault of its own. Blocks for a moment before."""
        time.sleep(LINGER)
        if self._store is not None:
            with suppress(StoreError):
                self._store.set(_given_up_key(self._rank), b"1")

    def _has_given_up(self, rank: int) -> bool:
        with suppress(StoreError):
            return self._store is not None and self._store.get(_given_up_key(rank)) is not None
        return False

    def _dead_ranks(self, patience: float) -> tuple[int, ...]:
        """Dead peers of this machine. A dying process closes its sockets a moment before it counts as dead."""
        deadline = time.monotonic() + patience
        while True:
            dead = tuple(rank for rank in self._watched if not self._peers[rank].is_alive())
            if dead or time.monotonic() >= deadline:
                return dead
            time.sleep(0.001)

    def _stopped_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._watched if self._peers[rank].is_stopped())

    def _lost(self, dead: tuple[int, ...]) -> PeerLost:
        names = ", ".join(f"rank {r} (pid {self._peers[r].pid} on {self._peers[r].host})" for r in dead)
        return PeerLost(
            f"rank {self._rank}: {names} of generation {self._generation} died; regroup without it",
            generation=self._generation,
            ranks=dead,
        )

    def _late(self, timeout: float) -> PeerTimeout:
        stopped = self._stopped_ranks()
        who = ", ".join(f"rank {r} (pid {self._peers[r].pid}, stopped)" for r in stopped) or "some rank"
        return PeerTimeout(
            f"rank {self._rank}: {who} of generation {self._generation} did not take part within {timeout:g} s; "
            f"it may hang. Look at its stack, raise the timeout, or regroup without it",
            generation=self._generation,
            ranks=stopped,
        )

    def _publish(self, kind: str, ranks: tuple[int, ...]) -> None:
        """Tell those who will only see this rank's connection close."""
        if self._store is None:
            return
        record = json.dumps({"v": 1, "kind": kind, "by": self._rank, "ranks": ranks}).encode()
        try:
            self._store.compare_and_set(FAILURE_KEY, None, record)
        except StoreError:
            pass  # the others then say PeerLost, which is true of this rank's connection

    def _told(self) -> BaseException | None:
        if self._store is None:
            return None
        try:
            data = self._store.get(FAILURE_KEY)
        except StoreError:
            return None
        if data is None:
            return None
        try:
            record = Fields(load_json(data, "failure"), "failure")
            kind, ranks, by = (
                record.text("kind"),
                tuple(record.integers("ranks", low=0)),
                record.integer("by"),
            )
        except ValueError:
            return None  # nobody of this group has written it
        if kind != "timeout":
            return None
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "some rank"
        return PeerTimeout(
            f"rank {self._rank}: {who} of generation {self._generation} did not take part within "
            f"{self._timeout:g} s (rank {by} waited longest); it may hang",
            generation=self._generation,
            ranks=ranks,
        )
