"""Lets go of what may block: the last reference to a backend is dropped in a thread.

Owns those threads. Dropping a backend closes its connections but waits for an operation in flight, which may last as
long as the group's timeout; nobody should wait for that. At the end of the process they get ``_PATIENCE`` seconds:
a backend torn down by the interpreter's own shutdown aborts the process.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

_PATIENCE = 5.0
_threads: set[threading.Thread] = set()


def drop(holder: list[Any], before: Callable[[], None] | None = None) -> None:
    """Empty ``holder``, which has the only references, without waiting for it; ``before`` is called first."""
    thread = threading.Thread(target=_clear, args=(holder, before), name="phalanx-release", daemon=True)
    _threads.add(thread)
    thread.start()


def _clear(holder: list[Any], before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    holder.clear()
    _threads.discard(threading.current_thread())


@atexit.register
def _wait_at_exit() -> None:
    deadline = time.monotonic() + _PATIENCE
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
