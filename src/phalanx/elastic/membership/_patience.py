"""Bounds how long a worker waits for its place in a round, and tells the agents whom it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from phalanx.comm.stores import Store
from phalanx.comm.stores._polling import slice_after
from phalanx.elastic.membership._coordinator import RegroupTimeout
from phalanx.errors import StoreTimeout
from phalanx.protocol import LostContact, Ready, timeouts


class Absence:
    """Tells the agents of workers with a state that are members and do not come for as long as a group's timeout."""

    def __init__(self, worker_id: str, timeout: float, tell_agents: Callable[[int, LostContact], None]) -> None:
        self._worker_id = worker_id
        self._timeout = timeout
        self._tell_agents = tell_agents
        self._seen: tuple[int, tuple[str, ...]] = (-1, ())
        self._since = 0.0

    def look(self, generation: int, absent: tuple[str, ...], mine: Ready) -> None:
        now = time.monotonic()
        if (generation, absent) != self._seen:
            self._seen, self._since = (generation, absent), now
        if not absent or now - self._since < self._timeout:
            return
        self._since = now
        reason = f"waited {self._timeout:g} s for {', '.join(absent)} to join generation {generation}"
        self._tell_agents(
            generation,
            LostContact(
                by=self._worker_id,
                of=absent,
                late=True,
                peers=(self._worker_id, *absent),
                step=mine.step,
                reason=reason,
            ),
        )


class Wait:
    """Short waits that grow, up to a deadline; ``report`` is called now and then with a growing number."""

    def __init__(self, timeout: float, report: Callable[[int], None]) -> None:
        self.timeout = timeout
        self._report = report
        self._began = self._reported = time.monotonic()
        self._sleep = 0.001
        self._count = 0

    def a_little(self, what: str) -> None:
        """Sleep."""
        self._look_at_the_clock(what)
        time.sleep(self._sleep)
        self._sleep = min(self._sleep * 1.2, 0.05)

    def for_keys(self, store: Store, keys: Sequence[str], what: str, since: float) -> list[bytes] | None:
        """Wait until all ``keys`` are there, or it is time to look elsewhere (None); ``since``: when waiting began."""
        self._look_at_the_clock(what)
        try:
            return store.wait(keys, slice_after(time.monotonic() - since))
        except StoreTimeout:
            return None

    def _look_at_the_clock(self, what: str) -> None:
        now = time.monotonic()
        if now - self._began > self.timeout:
            raise RegroupTimeout(f"waited {self.timeout:g} s for {what}; are there fewer workers than the minimum?")
        if now - self._reported > timeouts.PROGRESS_INTERVAL:
            self._count += 1
            self._reported = now
            self._report(-self._count)
