"""Keeps that a node was given notice: once, what it is about, and how its workers have left because of it.

Owns what follows for the end of the agent: see ``conclude``. Who asks for notices is ``_notices``.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence

from phalanx.launch.config._worker_spec import RunResult, WorkerState
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.system._signals import SignalException
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.preemption import Notice

log = logging.getLogger(__name__)


class Departure:
    """Stands for the way out of a node; without a notice it does nothing.

    >>> Departure().is_due(is_finishing=lambda: False)
    False
    """

    def __init__(self) -> None:
        self.notice: Notice | None = None
        self.has_withdrawn = False
        self._codes: dict[str, int] = {}
        """How workers that were asked to leave have ended, by their ids."""

    @property
    def is_on(self) -> bool:
        """Whether this node was given notice."""
        return self.notice is not None

    def begin(self, notice: Notice) -> bool:
        """Take a notice; False when there was one already."""
        if self.notice is not None:
            return False
        self.notice = notice
        log.warning(
            "this node was given notice (%s): its workers leave at the next step boundary", notice.describe(time.time())
        )
        return True

    def is_due(self, *, is_finishing: Callable[[], bool]) -> bool:
        """Return whether workers are to be asked to leave; after the last step they only run what follows it."""
        if self.notice is None:
            return False
        if is_finishing():
            log.warning("all steps are done: the workers of this node end by themselves")
            return False
        return True

    def note(self, worker: WorkerHandle) -> None:
        """Note how a worker that was asked to leave has ended."""
        code = worker.process.exit_code
        if self.notice is not None and code is not None:
            self._codes[worker.id] = code

    def is_deserted(self, workers: Sequence[WorkerHandle | None]) -> bool:
        """Return whether a node that waits for a generation was given notice and has no worker left to wait with. Then
        it withdraws: when all nodes are given notice, and too few are left, no generation comes.

        >>> Departure().is_deserted([])
        False
        """
        if self.notice is None or any(worker is not None and worker.is_running for worker in workers):
            return False
        for worker in workers:
            if worker is not None:
                self.note(worker)
        self.has_withdrawn = True
        return True

    def size_anew(self, size: int, ended: Sequence[WorkerHandle]) -> int:
        """Return how many workers this node has when all start anew; after a notice none, and those that have ``ended``
        for it were cut off by that.

        >>> Departure().size_anew(2, [])
        2
        """
        for worker in ended:
            self.note(worker)
        return size if self.notice is None else 0

    def conclude(self, result: RunResult, signum: signal.Signals | None) -> RunResult:
        """Return the result of a node that was given notice, by ``signum`` if by a signal.

        Raises:
            SignalException: workers have left because of a signal: the exit code says so, as to any other.
        """
        if self.notice is None or not self._codes or result.is_failed():
            return result
        if signum is not None:
            raise SignalException(f"its workers have left because of {signum.name}", sigval=signum)
        cut_off = sorted(worker for worker, code in self._codes.items() if code != 0)
        if not cut_off:
            return result
        message = (
            f"this node was given notice ({self.notice.reason}), and {', '.join(cut_off)} cannot leave at a step "
            "boundary (those of phalanx.Job can): what they had done since they last saved is lost"
        )
        failure = ProcessFailure(local_rank=-1, pid=0, exitcode=1, message=message, timestamp=time.time())
        return RunResult(WorkerState.FAILED, failures={0: failure})
