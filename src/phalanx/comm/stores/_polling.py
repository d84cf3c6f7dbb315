"""Waits on stores that cannot push: compares snapshots, but only when a cheap token says that something changed.

Guarantees: the last change of every key is reported; several quick changes of one key may be merged. A
writer that dies between its write and its token is still noticed, by an unconditional look every ``RELOOK``
seconds.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from phalanx.comm.stores._interface import Change, Watch
from phalanx.errors import StoreTimeout

SHORTEST, LONGEST, RELOOK = 0.0005, 0.02, 0.25
SHORTEST_SLICE, LONGEST_SLICE = 0.02, 0.25


def pause_after(waited: float) -> float:
    """Return how long to sleep before the next look: an eighth of the time waited so far, within bounds.

    So a short wait ends at once, a long one costs little, and none is prolonged by more than an eighth.
    """
    return min(LONGEST, max(SHORTEST, waited / 8))


def slice_after(waited: float) -> float:
    """Return how long to wait for a key in one go before looking elsewhere, at what would end the waiting in vain.

    Another eighth of the time waited so far, so that a thousand who wait for long do not keep the store busy.

    >>> [round(slice_after(waited), 3) for waited in (0.0, 0.4, 60.0)]
    [0.02, 0.05, 0.25]
    """
    return min(LONGEST_SLICE, max(SHORTEST_SLICE, waited / 8))


def wait_for_keys(
    read_many: Callable[[Sequence[str]], list[bytes | None]],
    keys: Sequence[str],
    timeout: float,
    address: str,
) -> list[bytes]:
    """``Store.wait`` by looking again and again."""
    started = time.monotonic()
    while True:
        values = read_many(keys)
        found = [value for value in values if value is not None]
        if len(found) == len(keys):
            return found
        waited = time.monotonic() - started
        if waited >= timeout:
            missing = [key for key, value in zip(keys, values, strict=True) if value is None]
            raise StoreTimeout(f"{address}: no {missing} after {timeout:g} s")
        time.sleep(min(pause_after(waited), timeout - waited))


def changes_between(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the keys that appeared, changed or vanished, in the order of the keys."""
    return sorted(key for key in before.keys() | after.keys() if before.get(key, None) != after.get(key, None))


class PollingWatch(Watch):
    """Subclasses say how to take a snapshot (stamps that differ after every write) and how to read the token.

    Call ``start`` once the subclass can answer.
    """

    @abstractmethod
    def _token(self) -> bytes | None:
        """Differs after every write to the store; cheap to read."""

    @abstractmethod
    def _snapshot(self) -> dict[str, bytes]:
        """Return every key under the prefix with a stamp that no two writes share."""

    @abstractmethod
    def _value(self, stamp: bytes) -> bytes:
        """Return the value that a stamp stands for."""

    def start(self) -> None:
        self._seen_token = self._token()
        self._seen = self._snapshot()
        self._looked = self._changed = time.monotonic()

    def wait(self, timeout: float) -> list[Change]:
        started = time.monotonic()
        while True:
            changes = self._look()
            now = time.monotonic()
            if changes or now - started >= timeout:
                return changes
            time.sleep(min(pause_after(now - self._changed), started + timeout - now))

    def _look(self) -> list[Change]:
        token = self._token()  # before the snapshot: a change in between is seen twice, never missed
        now = time.monotonic()
        if token == self._seen_token and now - self._looked < RELOOK:
            return []
        before, self._seen = self._seen, self._snapshot()
        self._seen_token, self._looked = token, now
        if before != self._seen:
            self._changed = now
        return [
            Change(key, self._value(self._seen[key]) if key in self._seen else None)
            for key in changes_between(before, self._seen)
        ]
