"""Works on the newest of the items that it is given, in a thread of its own, so that who gives them never waits.

One item is worked on at a time; a newer one replaces one that has not been begun. When the disk or the network does not
take it (``OSError``: full, read-only, out of reach) the item stays and is tried again with growing pauses;
``on_failed`` hears of each attempt, and nobody else. ``wait_idle`` is for a caller that must know: it tries at once and
raises. Any other error is a fault of ours and is raised at the next ``submit`` or ``wait_idle``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from phalanx.comm._background import Background
from phalanx.events._troubles import Backoff

Item = TypeVar("Item")


class LatestOnly(Generic[Item]):
    def __init__(
        self,
        work: Callable[[Item], None],
        name: str,
        *,
        on_failed: Callable[[Item, OSError, float], None] = lambda item, error, delay: None,
    ) -> None:
        self.backoff = Backoff()
        self._work = work
        self._name = name
        self._on_failed = on_failed
        self._next: Item | None = None
        self._current: Item | None = None
        """What is worked on: no local variable of the thread, which would hold it until the next one comes."""
        self._is_hurried = False
        """Whether someone waits: the next attempt is made at once."""
        self._num_begun = 0
        self._failed = (0, OSError())
        """The number of the last attempt that failed, and its error."""
        self._busy = False
        self._is_unwanted = False
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: Background | None = None

    def submit(self, item: Item) -> None:
        """Have it done soon; replaces an item that still waits."""
        with self._changed:
            self._raise_error()
            self._next, self._is_unwanted = item, False
            if self._thread is None:
                self._thread = Background(self._run, self._name, on_failure=self._fail)
                self._thread.start()
            self._changed.notify_all()

    def wait_idle(self) -> None:
        """Block until everything submitted is done. ``OSError`` when an attempt made now fails."""
        with self._changed:
            before = self._num_begun
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle or self._failed[0] > before)
            self._is_hurried = False
            self._raise_error()
            if not self._is_idle:
                raise self._failed[1]

    def is_unwanted(self) -> bool:
        """Return whether nobody wants the item that is worked on any more: it was given up, or there is a newer one."""
        return self._is_unwanted or self._next is not None

    def give_up(self, is_dropped: Callable[[Item], bool]) -> None:
        """Say that the item that is worked on is unwanted, and forget the one that waits if ``is_dropped`` says so."""
        with self._changed:
            self._is_unwanted = True
            if self._next is not None and is_dropped(self._next):
                self._next = None
            self._changed.notify_all()

    def close(self) -> None:
        """Do what was submitted, if it can be done now, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    @property
    def _is_idle(self) -> bool:
        return self._next is None and not self._busy

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _fail(self, error: BaseException) -> None:
        """The thread is over: the next ``submit`` says why and starts another."""
        with self._changed:
            self._error, self._next, self._current, self._busy, self._thread = error, None, None, False, None
            self._changed.notify_all()

    def _run(self) -> None:
        while self._take_next():
            failed: OSError | None = None
            try:
                assert self._current is not None, "it was taken"
                self._work(self._current)
            except OSError as error:
                failed = error
            except Exception as error:
                self._error = error
            self._end_attempt(failed)

    def _take_next(self) -> bool:
        """Wait for the item to work on now; whether there is one, or it is time to end."""
        with self._changed:
            while self._next is None or not self._is_due():
                if self._next is None and self._closed:
                    return False
                self._changed.wait(None if self._next is None else self.backoff.pause)
            self._current, self._next = self._next, None
            self._busy, self._is_hurried = True, False
            self._num_begun += 1
            return True

    def _is_due(self) -> bool:
        return self._is_hurried or self._closed or not self.backoff.pause

    def _end_attempt(self, failed: OSError | None) -> None:
        assert self._current is not None, "it was worked on"
        if failed is not None:  # told before anybody who waits goes on
            self._on_failed(self._current, failed, self.backoff.fail())
        else:
            self.backoff.reset()
        with self._changed:
            self._failed = (0, OSError()) if failed is None else (self._num_begun, failed)
            if failed is not None and self._next is None and not self._closed and not self._is_unwanted:
                self._next = self._current
            self._current = None  # who waits finds that nobody refers to what was done
            self._busy = False
            self._changed.notify_all()
