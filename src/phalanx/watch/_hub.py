"""Numbers the events of a job, keeps them for whoever comes back, and wakes those who wait for the next one.

Owns the view that they add up to. An event has a number of this hub, and a hub a name of its own: who comes back with
the number of another hub (another agent serves now) gets everything that is kept. Any thread may call.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from phalanx.events._agent_events import NodeLoad
from phalanx.events._event_types import AnyEvent, StepCommitted, WorkerStepTimes
from phalanx.events._lines import dump, from_json, from_record, to_json
from phalanx.watch._view import JobView

MAX_KEPT = 20_000
"""Events that can be replayed."""
MAX_BULK = 2_000
"""Of the times of steps and the load of nodes, which are summed up and soon forgotten."""
BATCH = 500
"""Lines that are added while nobody else can look."""
STEP = StepCommitted.kind
BULK = (WorkerStepTimes.kind, NodeLoad.kind)


class Numbered(NamedTuple):
    """An event with its number; ``line`` is its JSON."""

    number: int
    kind: str
    line: str
    is_local: bool = True
    """Whether it was told on this node; else it came from another agent."""


class Hub:
    """Takes events, in any thread.

    >>> from phalanx.events._event_types import ShutDown
    >>> hub = Hub("demo")
    >>> hub.add(ShutDown(job="demo", reason="done", succeeded=True))
    1
    >>> [event.kind for event in hub.after(0)]
    ['shut_down']
    """

    def __init__(self, job: str = "", clock: Callable[[], float] = time.time) -> None:
        self.name = secrets.token_hex(4)
        self.view = JobView(job)
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._kept: deque[Numbered] = deque(maxlen=MAX_KEPT)
        self._steps: deque[Numbered] = deque(maxlen=MAX_KEPT)
        """Apart: there are so many that nothing else would be kept."""
        self._bulk: deque[Numbered] = deque(maxlen=MAX_BULK)
        self._forgotten: Counter[str] = Counter()
        """By kind: how many events are not kept any more."""
        self._number = 0

    @property
    def number(self) -> int:
        """Return that of the last event."""
        return self._number

    def now(self) -> float:
        return self._clock()

    def add(self, event: AnyEvent) -> int:
        """Add an event that was just told here; its number."""
        line = to_json(event)
        told = from_json(line)
        with self._changed:
            self._put(told, line, True)
            self._changed.notify_all()
            return self._number

    def add_record(self, record: Any, text: str = "", *, is_local: bool = True) -> None:
        """Add what a line of a file or of another agent says; ``text`` is that line, if it is there to be kept.

        A line that is no event is counted.
        """
        with self._changed:
            self._put_record(record, text, is_local)
            self._changed.notify_all()

    def add_records(self, lines: Sequence[tuple[Any, str]]) -> None:
        """Add what many lines say; whoever waits wakes up once for some hundred of them."""
        for first in range(0, len(lines), BATCH):
            with self._changed:
                for record, text in lines[first : first + BATCH]:
                    self._put_record(record, text, True)
                self._changed.notify_all()

    def _put_record(self, record: Any, text: str, is_local: bool) -> None:
        """Add what one line says. Under the lock; the caller wakes those who wait."""
        try:
            event = from_record(record)
        except ValueError:
            self.view.num_bad += 1
            return
        # A carriage return is a space to JSON, and the end of a line to who follows the stream.
        self._put(event, text if text and "\r" not in text else dump(record), is_local)

    def _put(self, event: AnyEvent, line: str, is_local: bool) -> None:
        self._number += 1
        try:
            self.view.take(event)
        except (ArithmeticError, ValueError, TypeError, KeyError, IndexError):  # values that make no sense
            self.view.num_bad += 1
        kind = event.kind
        kept = self._steps if kind == STEP else self._bulk if kind in BULK else self._kept
        if len(kept) == kept.maxlen:
            self._forgotten[kept[0].kind] += 1
        kept.append(Numbered(self._number, kind, line, is_local))

    def after(
        self,
        number: int,
        *,
        kinds: Collection[str] = (),
        without: Collection[str] = (),
        limit: int = MAX_KEPT,
        bulk: bool = False,
        local: bool = False,
    ) -> list[Numbered]:
        """Return the events after a number that are still kept.

        ``kinds``: only these; ``without``: none of these; ``bulk``: also the times of steps and the like; ``local``:
        only those of this node.
        """
        with self._changed:
            found = _later(self._kept, number)
            if _is_asked_for(STEP, kinds, without):  # an open page asks for none of the many steps
                found += _later(self._steps, number)
            found = sorted(found + _later(self._bulk, number) if bulk else found)
        asked = (
            event for event in found if _is_asked_for(event.kind, kinds, without) and (event.is_local or not local)
        )
        return list(itertools.islice(asked, limit))

    def num_forgotten(self, *, kinds: Collection[str] = (), without: Collection[str] = (), bulk: bool = False) -> int:
        """Return how many events ``after`` would give as well, were all kept."""
        with self._changed:
            counts = [
                count
                for kind, count in self._forgotten.items()
                if _is_asked_for(kind, kinds, without) and (bulk or kind not in BULK)
            ]
        return sum(counts)

    def wait(self, number: int, timeout: float) -> bool:
        """Wait for an event after a number; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._number > number, timeout)

    def read(self, look: Callable[[JobView], Any]) -> Any:
        """Return what a function makes of the view, while nothing is added to it."""
        with self._changed:
            return look(self.view)


def _is_asked_for(kind: str, kinds: Collection[str], without: Collection[str]) -> bool:
    return (not kinds or kind in kinds) and kind not in without


def _later(events: deque[Numbered], number: int) -> list[Numbered]:
    """Return those after a number; they are looked at from the end, where a reader that follows along is."""
    found = list(itertools.takewhile(lambda event: event.number > number, reversed(events)))
    found.reverse()
    return found
