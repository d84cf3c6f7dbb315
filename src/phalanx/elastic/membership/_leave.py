"""Ends a worker's process: politely when asked to, after a script that has ended well, or with an error at its exit.

SIGTERM, or another signal of the user's choice, is a polite request to leave: the worker finishes its step, hands over
and exits with code 0. Handlers are there only while the job's loop runs and only in the main thread. The same signal a
second time is not polite any more: it does what it did before the loop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from phalanx import protocol


def leave_signals(chosen: Sequence[str] | None, environ: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """Return the signals that ask a worker to leave. ``ValueError`` if its agent would ask by another one.

    >>> leave_signals(None, {}) == (signal.SIGTERM,)
    True
    """
    asked_by = environ.get(protocol.ENV_LEAVE_SIGNAL, "").upper()
    if chosen is None:
        chosen = ("SIGTERM", asked_by) if asked_by not in ("", "SIGTERM") else ("SIGTERM",)
    names = [name.upper() for name in chosen]
    unknown = [name for name in names if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")]
    if unknown:
        raise ValueError(f"leave_signals has {unknown[0]!r}; expected names of signals such as SIGTERM or SIGUSR1")
    if names and asked_by and asked_by not in names:
        raise ValueError(
            f"leave_signals is {', '.join(names)}, but this worker's agent asks by {asked_by}; add it, or run with "
            f"--leave-signal {names[0]}"
        )
    return tuple(dict.fromkeys(signal.Signals[name] for name in names))


class LeaveRequest:
    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self._signals = tuple(signals)
        self.requested = False
        self.announced_in = -1
        """The generation whose other workers were told."""
        self.is_counted = False
        """Whether the reduction of the last step carried it, so that all workers know of it at the boundary."""

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Take the signals as requests to leave, for the time of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.getsignal(signum) for signum in self._signals}

        def handle(signum: int, frame: FrameType | None) -> None:
            self.requested = True
            signal.signal(signum, before[signal.Signals(signum)])

        for each in before:
            signal.signal(each, handle)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def has_ended_well(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the script, which has ended, did so with code 0. Asked in an exit function.

    Our launcher says so; where the interpreter was started by somebody else (``--no-python``), an exception that nobody
    caught is known, but not the code of a ``sys.exit``.
    """
    code = environ.get(protocol.ENV_EXIT_CODE)
    if code is not None:
        return code == "0"
    return getattr(sys, "last_value", None) is None


def fail_at_exit(error: BaseException) -> NoReturn:
    """End this process with an error: an exception that leaves an exit function would change nothing."""
    with suppress(Exception):
        print(f"phalanx: {type(error).__name__}: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
