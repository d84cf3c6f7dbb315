"""Ends a worker's process: politely on SIGTERM, after a script that has ended well, or with an error at its exit.

SIGTERM is a polite request to leave: the worker finishes its step, hands over and exits with code 0. The handler is
there only while the job's loop runs and only in the main thread. A second SIGTERM is not polite any more: it does what
it did before the loop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from phalanx import protocol


class LeaveRequest:
    def __init__(self) -> None:
        self.requested = False
        self.announced_in = -1
        """The generation whose other workers were told."""
        self.is_counted = False
        """Whether the reduction of the last step carried it, so that all workers know of it at the boundary."""

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Take SIGTERM as a request to leave, for the time of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)

        def handle(signum: int, frame: FrameType | None) -> None:
            self.requested = True
            signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


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
