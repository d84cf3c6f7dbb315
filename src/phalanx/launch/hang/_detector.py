"""Notices workers that stop making progress.

Owns the rule, as a pure bookkeeping object with the time passed in: a worker is watched from its first report on; once
any worker of the node has reported, the others are watched too, from their start. Until a worker has computed something
(it reports a step, and no count of 0 beside it) it *starts*, which has a limit of its own: imports, data, compilation.
One that is stopped by a signal neither starts nor computes: that counts from when it was seen. A worker reports with
``phalanx.launch.report_progress`` (elastic jobs do it by themselves); scripts that never report are never suspected.
Of several that are silent, the one is to blame that does not merely wait for others.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass

from phalanx import protocol
from phalanx.errors import StoreError
from phalanx.protocol import ProgressReport, RecordError

log = logging.getLogger(__name__)


@dataclass
class _LastReport:
    value: bytes | None
    at: float
    has_started: bool = False
    stopped_at: float | None = None

    def take(self, value: bytes | None, now: float) -> None:
        report = parse_report(value)
        has_computed = report.step >= 0 and report.count != 0
        self.has_started = self.has_started or has_computed
        self.value, self.at = value, now


class HangDetector:
    """Finds who hangs, from what the store says about progress.

    >>> hang = HangDetector(timeout=10.0)
    >>> hang.observe({"a": b"1", "b": None}, now=0.0)
    >>> hang.hanging(now=11.0)
    ['a', 'b']
    >>> hang.to_blame(now=11.0, waiting={"a"})
    'b'
    """

    def __init__(self, timeout: float, start_timeout: float = 0.0, interval: float = math.inf) -> None:
        """``interval``: how often it is fed. When that took much longer, this process was not let run, nor maybe were
        the workers (all of a job stopped and continued, a machine that slept): that time is not held against them."""
        self._timeout = timeout
        self._start_timeout = max(timeout, start_timeout)
        self._longest = 4 * interval
        self._looked = math.inf
        self._seen: dict[str, _LastReport] = {}

    def observe(self, progress: Mapping[str, bytes | None], now: float, stopped: Container[str] = ()) -> None:
        """Take in ``progress``: the newest report of every running worker, None for one that never reported;
        ``stopped`` are those that the kernel does not let run."""
        pause, self._looked = max(0.0, now - self._looked - self._longest), now
        for worker_id, seen in list(self._seen.items()):
            seen.at += pause
            if worker_id not in progress:
                del self._seen[worker_id]
        for worker_id, value in progress.items():
            seen = self._seen.setdefault(worker_id, _LastReport(None, now))
            if seen.value != value:
                seen.take(value, now)
            if worker_id not in stopped:
                seen.stopped_at = None
            else:
                seen.stopped_at = now if seen.stopped_at is None else seen.stopped_at + pause

    def limit(self, worker_id: str) -> float:
        """Return how long this worker may be silent, in seconds."""
        seen = self._seen.get(worker_id)
        is_bound = seen is not None and (seen.has_started or seen.stopped_at is not None)
        return self._timeout if is_bound else self._start_timeout

    def reset(self, now: float) -> None:
        """Give everybody the full time again: a new generation has formed."""
        for seen in self._seen.values():
            seen.at = now
            seen.stopped_at = None

    def hanging(self, now: float) -> list[str]:
        """Return workers without progress for too long, the longest first."""
        if not any(seen.value is not None for seen in self._seen.values()):
            return []
        late = [(seen.at, worker_id) for worker_id, seen in self._seen.items() if self._is_late(worker_id, now)]
        return [worker_id for _, worker_id in sorted(late)]

    def _is_late(self, worker_id: str, now: float) -> bool:
        seen = self._seen[worker_id]
        if seen.stopped_at is not None and not seen.has_started:
            return now - seen.stopped_at > self._timeout
        return now - seen.at > self.limit(worker_id)

    def to_blame(self, now: float, waiting: Container[str]) -> str | None:
        """Return the one that hangs and is not ``waiting`` for others, silent for longest; None while that is not
        clear.

        One that waits is taken only after twice the time: by then whoever it waits for, maybe on another node, would
        have been found, so the exchange between them is itself what hangs.
        """
        late = self.hanging(now)
        for worker_id in late:
            if worker_id not in waiting:
                return worker_id
        return next((each for each in late if now - self._seen[each].at > 2 * self.limit(each)), None)


def parse_report(data: bytes | None) -> ProgressReport:
    """Return what a worker reported; nothing, when it has not, and when it is no report.

    >>> parse_report(ProgressReport(step=7).to_json()).step, parse_report(None).step, parse_report(b"garbage").step
    (7, -1, -1)
    """
    try:
        return ProgressReport() if data is None else ProgressReport.from_json(data)
    except RecordError:  # a worker may report what it likes
        return ProgressReport()


class _Reporter:
    """Holds a worker's connection for progress reports; made at the first report, one per process."""

    def __init__(self) -> None:
        from phalanx.comm.stores import connect, job_store  # start-up speed: scripts import this module

        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.store = job_store(connect(os.environ[protocol.ENV_STORE]), os.environ[protocol.ENV_JOB])
        self.key = protocol.progress_key(os.environ[protocol.ENV_WORKER_ID])
        self.last = float("-inf")


_reporter: list[_Reporter] = []


def report_progress(step: int, *, at_most_every: float = 0.2) -> None:
    """Tell the agent that this worker is alive and at ``step``. Cheap: most calls only look at the clock.

    Count steps over the whole job, not anew in every epoch: by a step that no worker had reached before the agent knows
    that the job makes progress.
    Does nothing in a process that no agent started, so a script can call it unconditionally.

    >>> report_progress(17)
    """
    if protocol.ENV_STORE not in os.environ or protocol.ENV_WORKER_ID not in os.environ:
        return
    if not _reporter or _reporter[0].pid != os.getpid():
        _reporter[:] = [_Reporter()]
    reporter = _reporter[0]
    now = time.monotonic()
    with reporter.lock:
        if now - reporter.last < at_most_every:
            return
        reporter.last = now
        try:
            reporter.store.set(reporter.key, ProgressReport(step=step).to_json())
        except StoreError as error:  # a report is a courtesy: training decides by itself whether it can go on
            log.warning("progress cannot be reported: %s", error)
            reporter.last = float("inf")
