"""Runs helper threads whose end is always noticed.

Owns how a thread that fails is begun again, and who hears of it when that does not help. Every thread that must live
as long as its owner is made here: one that ends quietly leaves a job that looks healthy and has stopped listening.

Guarantees: an exception never ends the thread in silence. It is logged with its traceback and ``body`` is called again
after a pause that doubles; after ``attempts`` failures, none of which lasted ``CALM`` seconds, or at once for an error
in ``final``, ``on_failure`` is called with the error, in this thread, once. A ``body`` that returns is done. The
system knows each thread by its name, so that ``top -H`` says which one is busy.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

ATTEMPTS = 6
FOREVER = sys.maxsize
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
CALM = 30.0
"""Seconds without a failure after which earlier ones are forgotten."""
_LONGEST_NAME = 15
"""Characters of a thread's name that Linux keeps."""


class Background:
    """A daemon thread that runs ``body``; ``stop``, when set, ends its pauses.

    >>> def body(): raise ValueError("odd")
    >>> heard = []
    >>> thread = Background(body, "demo", on_failure=heard.append, attempts=1)
    >>> thread.start(); thread.join()
    >>> heard
    [ValueError('odd')]
    """

    def __init__(
        self,
        body: Callable[[], object],
        name: str,
        *,
        on_failure: Callable[[BaseException], object],
        attempts: int = ATTEMPTS,
        final: tuple[type[BaseException], ...] = (),
        stop: threading.Event | None = None,
    ) -> None:
        self._body = body
        self._name = name
        self._on_failure = on_failure
        self._attempts = attempts
        self._final = final
        self._stop = stop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def native_id(self) -> int:
        """The number by which the system knows the thread; 0 before it has started."""
        return self._thread.native_id or 0

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        _tell_system(self._name)
        try:
            error = self._repeat()
            if error is not None:
                self._on_failure(error)
        finally:
            del (
                self._body,
                self._on_failure,
            )  # what they hold must not live on because somebody keeps this object

    def _repeat(self) -> BaseException | None:
        """Run the body until it returns (None) or is given up."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                self._body()
                return None
            except BaseException as error:
                if isinstance(error, self._final) or self._attempts == 1:
                    return error
                failures = 1 if time.monotonic() - began >= CALM else failures + 1
                is_over = failures >= self._attempts
                what = "it ends" if is_over else "it begins again"
                log.exception("the thread %s failed (%d in a row); %s", self._name, failures, what)
                if is_over:
                    return error
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures - 1, 10))
            if self._stop is None:
                time.sleep(pause)
            elif self._stop.wait(pause):
                return None


def _tell_system(name: str) -> None:
    """Name the calling thread for ``top -H`` and ``/proc/PID/task/*/comm``, where the system allows it."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:_LONGEST_NAME])


def start(
    body: Callable[[], object],
    name: str,
    *,
    on_failure: Callable[[BaseException], object],
    attempts: int = 1,
    final: tuple[type[BaseException], ...] = (),
) -> Background:
    """Start a thread, by default one whose first failure is final."""
    thread = Background(body, name, on_failure=on_failure, attempts=attempts, final=final)
    thread.start()
    return thread
