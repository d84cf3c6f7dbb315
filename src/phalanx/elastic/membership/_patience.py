"""How a worker waits for a seat: in short sleeps up to a limit, with word to the agents of those who do not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from phalanx import protocol
from phalanx.elastic.membership._interface import RegroupTimeout
from phalanx.elastic.membership._rounds import Ready
from phalanx.elastic.membership._store_monitor import PROGRESS_EVERY


class Teller(Protocol):
    """Who waits."""

    worker_id: str
    comm_timeout: float

    def tell_agents(self, generation: int, word: protocol.LostContact) -> None: ...


class Absence:
    """Tells the agents of workers with a state that are members and do not come for as long as a group's timeout."""

    def __init__(self, roster: Teller) -> None:
        self._roster = roster
        self._seen: tuple[int, tuple[str, ...]] = (-1, ())
        self._since = 0.0

    def look(self, generation: int, absent: tuple[str, ...], members: tuple[str, ...], mine: Ready) -> None:
        roster, now = self._roster, time.monotonic()
        if (generation, absent) != self._seen:
            self._seen, self._since = (generation, absent), now
        if not absent or now - self._since < roster.comm_timeout:
            return
        self._since = now
        reason = f"waited {roster.comm_timeout:g} s for {', '.join(absent)} to join generation {generation}"
        roster.tell_agents(
            generation,
            protocol.LostContact(
                by=roster.worker_id,
                of=absent,
                late=True,
                peers=(roster.worker_id, *absent),
                step=mine.step,
                reason=reason,
            ),
        )


class Wait:
    """Short sleeps that grow, up to a deadline; ``report`` is called now and then with a growing number."""

    def __init__(self, timeout: float, report: Callable[[int], None]) -> None:
        self.timeout = timeout
        self._report = report
        self._began = self._reported = time.monotonic()
        self._sleep = 0.002
        self._count = 0

    def a_little(self, what: str) -> None:
        now = time.monotonic()
        if now - self._began > self.timeout:
            raise RegroupTimeout(
                f"waited {self.timeout:g} s for {what}; are there fewer workers than the minimum?"
            )
        if now - self._reported > PROGRESS_EVERY:
            self._count += 1
            self._reported = now
            self._report(-self._count)
        time.sleep(self._sleep)
        self._sleep = min(self._sleep * 1.2, 0.05)
