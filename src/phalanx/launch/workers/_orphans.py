"""Workers whose zygote was killed: they live on as children of the agent, which waits for their ends itself.

Assumptions: the agent adopts orphans (``_linux.adopt_orphans``), else their ends cannot be known, and they are killed.
Guarantees: as the zygote's own: a worker's process group is killed before the worker is reaped.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.comm._background import Background, start
from phalanx.launch.system import _linux

if TYPE_CHECKING:
    from phalanx.launch.workers._processes import WorkerProcess

log = logging.getLogger(__name__)


def adopt(process: WorkerProcess, on_exit: Callable[[WorkerProcess], None]) -> Background:
    """Report the end of an orphan when it comes; the thread that does."""

    def failed(error: BaseException) -> None:
        log.error(
            "the end of worker process %d cannot be waited for, so it is killed: %r", process.pid, error
        )
        _linux.signal_group(process.pid, signal.SIGKILL)
        process.ended_at = time.time()
        process.end(-signal.SIGKILL)
        on_exit(process)

    return start(lambda: _wait(process, on_exit), f"phalanx-orphan-{process.pid}", on_failure=failed)


def _wait(process: WorkerProcess, on_exit: Callable[[WorkerProcess], None]) -> None:
    pid = process.pid
    try:
        # The zombie is left for a moment: as long as it is there, its pid names its group and no other.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # never ours: its zygote had reaped it, or another process adopts orphans
        found = None
    _linux.signal_group(pid, signal.SIGKILL)
    process.ended_at = time.time()
    if found is None:
        process.end(-signal.SIGKILL)
    else:
        process.end(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
        os.waitpid(pid, 0)
    on_exit(process)
