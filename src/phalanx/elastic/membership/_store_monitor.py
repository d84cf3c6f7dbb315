"""Looks at the store in a thread while the worker computes, and raises flags.

Owns the reading of the keys that can end or question a round: the generation was broken (the group is aborted at
once, so that a collective in flight raises), a regroup is wanted, someone waits to join, someone leaves. It also
writes the worker's progress, and that it can regroup, should that be gone. One read of a few keys per tick; the main
thread only ever looks at the flags. All that is read are signed records (where the job has a secret): nobody else can
ask for a regroup.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from phalanx import protocol
from phalanx.comm._background import Background
from phalanx.comm.stores import Store
from phalanx.elastic.membership._committed_steps import CommittedSteps
from phalanx.elastic.membership._rounds import Membership, is_over
from phalanx.elastic.tools._step_clock import WorkerPace
from phalanx.errors import PeerLost, StoreError
from phalanx.protocol import PRESENT, JobKeys, ProgressReport, timeouts

log = logging.getLogger(__name__)


@dataclass
class Signals:
    """Flags of one place: set by the monitor, read by the main thread."""

    broken: PeerLost | None = None
    wish: bool = False
    """Regroup at the next step boundary."""
    saves_asked: int = 0
    """How often somebody has asked for a save."""


class StoreMonitor:
    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        membership: Membership,
        worker_id: str,
        signals: Signals,
        absent: tuple[str, ...] = (),
    ) -> None:
        """``absent``: the members of the generation that have no place in this round, and live. ``store`` is for this
        monitor and those after it: it is not closed here."""
        self.progress = (-1, 0)
        self.pace = WorkerPace()
        """The step, and how often the main thread reported."""
        self.is_waiting = False
        """Whether the main thread waits for other workers: then it is not the one that hangs."""
        self.committed = 0
        """How many steps are committed, if this worker is the one to write it down."""
        self._store = store
        self._keys = keys
        self._committed_steps = CommittedSteps(store, keys)
        self._noted = 0
        self._membership = membership
        self._worker_id = worker_id
        self._signals = signals
        self._stop = threading.Event()
        self._thread = Background(self._run, "phalanx-watch", on_failure=self._fail, stop=self._stop)
        g = membership.generation
        self._looked_at = [
            protocol.broken_key(g),
            protocol.regroups_key(worker_id),
            protocol.SAVE_ASKED,
            protocol.wanted_key(g),
            keys.leaving(g),
            *(keys.ready(g, worker) for worker in absent),
        ]
        self._reported = ((-1, 0), 0.0)
        self._num_waits = 0
        self._broken_since = 0.0
        self._has_complained = False
        self.has_lost_store = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End the thread; with ``wait`` no flag changes after this returns. Else it may still end its group, which has
        to be over already."""
        self._stop.set()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        interval = timeouts.watch_interval(self._membership.rank, len(self._membership.workers))
        while not self._stop.wait(interval):
            try:
                if self._look() or self._stop.is_set():
                    return
                self._report()
                committed = self.committed
                if committed != self._noted and self._committed_steps.note(committed):
                    self._noted = committed
            except StoreError as error:
                self.has_lost_store = True
                self._break(f"the job's store is gone: {error}")
                return

    def _fail(self, error: BaseException) -> None:
        """Without this thread the worker would never hear that its generation is over: let it regroup, and say why."""
        self._break(f"worker {self._worker_id} cannot watch the job's store any more: {error!r}")

    def _look(self) -> bool:
        """Read the keys once; True when the generation is over."""
        broken, said, save, *wishes = self._store.get_many(self._looked_at)
        if said is None:  # a stranger has written over it; without it agents would start all workers anew
            self._store.set(protocol.regroups_key(self._worker_id), PRESENT)
        record = None if broken is None else self._parse(broken)
        if record is not None:
            self._broken_since = self._broken_since or time.monotonic()
            is_late = time.monotonic() - self._broken_since > timeouts.UNFINISHED_STEP
            if is_over(record, self._membership.workers) or (is_late and (not record.workers or self._has_been_left())):
                self._break(record.reason)
                return True
            self._signals.wish = True  # nobody of this round is gone: the step under way can be finished
        if any(wish is not None for wish in wishes):
            self._signals.wish = True
        if save is not None and save.isdigit() and len(save) < 18:
            self._signals.saves_asked = int(save)
        return False

    def _has_been_left(self) -> bool:
        """Return whether another worker of the round waits for a place in the next generation. Those who cross a step
        boundary do so together; it gave the group up while that was formed, and no step can be finished without it."""
        g, others = self._membership.generation + 1, set(self._membership.workers) - {self._worker_id}
        return any(one is not None for one in self._store.get_many([self._keys.ready(g, other) for other in others]))

    def _parse(self, data: bytes) -> protocol.Broken | None:
        try:
            return protocol.Broken.from_json(data)
        except protocol.RecordError as error:
            if not self._has_complained:
                log.warning("generation %d: ignored a record: %s", self._membership.generation, error)
            self._has_complained = True
            return None

    def _break(self, reason: str) -> None:
        g = self._membership.generation
        error = PeerLost(f"generation {g} is over: {reason}", generation=g)
        self._signals.broken = error
        if self._membership.group is not None:
            self._membership.group.abort(error)

    def _report(self) -> None:
        progress, now = self.progress, time.monotonic()
        if now - self._reported[1] < timeouts.progress_interval(len(self._membership.workers)) or (
            progress == self._reported[0] and not self.is_waiting
        ):
            return
        self._num_waits += self.is_waiting
        report_progress(self._store, self._worker_id, *progress, self._num_waits, self.pace)
        self._reported = (progress, now)


def report_progress(
    store: Store,
    worker_id: str,
    step: int,
    count: int,
    num_waits: int,
    pace: WorkerPace = WorkerPace(),  # noqa: B008  # a frozen value
) -> None:
    """Tell the agent's hang detector that something moves, or that this worker only waits for others."""
    report = ProgressReport(step=step, count=count, waits=num_waits, times=pace.times, slots=pace.slots)
    store.set(protocol.progress_key(worker_id), report.to_json())
