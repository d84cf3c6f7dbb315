"""Tells the world what an agent does: one typed event and the metrics for every change of state.

Owns the translation from the agent's words to ``events`` and ``metrics``; the agent itself knows neither.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from phalanx.launch.agent._node_watch import NodeWatch
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.events import (
    ActionAsked,
    AnyEvent,
    EventLog,
    GenerationEnded,
    GenerationFormed,
    JobRestarted,
    JobWentBack,
    LimitReached,
    NodeNoticed,
    ShutDown,
    WorkerExited,
    WorkerFailed,
    WorkerHung,
    WorkerReplaced,
    WorkerStarted,
    get_event_handler,
)
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.metrics import Metrics, make_handler
from phalanx.launch.rendezvous._interface import RendezvousInfo
from phalanx.launch.telemetry._event_metrics import measure
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.preemption import Notice
from phalanx.protocol import Action, Recovery, Setbacks

log = logging.getLogger(__name__)

MAX_MESSAGE = 4000
"""Characters of a failure's message, and of each of its last lines, that an event carries."""
MAX_STACKS = 20_000


class Observer:
    """Hears of everything, never fails a job. Without a log and a handler it does nothing.

    >>> Observer("demo").shut_down("all workers succeeded", succeeded=True)
    """

    def __init__(
        self,
        job: str,
        log: EventLog | None = None,
        metrics: Metrics | None = None,
        watch: NodeWatch | None = None,
    ) -> None:
        self._watch = watch
        self._job = job
        self._log = log or EventLog(None)
        self._metrics = metrics or Metrics()
        self._node_rank = self._generation = -1
        self._joined_at = time.monotonic()
        self._failed: set[int] = set()

    @classmethod
    def create(cls, config: LaunchConfig, path: str | None, watch: NodeWatch | None = None) -> Observer:
        """Send events to a file and the named handler, metrics as configured. ``ValueError`` for an unknown name.

        Metrics whose port is taken or whose file cannot be opened go nowhere, with a warning.
        """
        job, metrics = config.run_id, config.metrics_cfg
        events = EventLog(path, get_event_handler(config.event_log_handler), job=job)
        try:
            handler = make_handler(dict(metrics))
        except OSError as error:
            log.warning("no metrics: %s: %s", ", ".join(f"{k}={v}" for k, v in metrics.items()), error)
            return cls(job, events, watch=watch)
        if watch is not None:
            watch.exposition = handler.exposition
        return cls(job, events, Metrics(handler), watch)

    def joining(self) -> None:
        self._joined_at = time.monotonic()

    def generation_formed(self, info: RendezvousInfo, num_wanted: int = 0) -> None:
        self._node_rank, self._generation = info.rank, info.generation
        if self._watch is not None:
            self._watch.formed(info)
        seconds = time.monotonic() - self._joined_at
        self._write(
            GenerationFormed(
                **self._where(info.generation),
                num_nodes=info.world_size,
                num_workers=info.num_workers,
                seconds=seconds,
                num_wanted=num_wanted,
            )
        )

    def generation_ended(self, generation: int, recovery: Recovery, max_restarts: int) -> None:
        where = self._where(generation)
        self._write(GenerationEnded(**where, how=recovery.action.value, reason=recovery.reason))
        if recovery.limit:
            nodes = recovery.leave_out
            self._write(LimitReached(**where, limit=recovery.limit, reason=recovery.reason, nodes=nodes))
        if recovery.action in (Action.RESTART, Action.HEAL):
            self._write(
                JobRestarted(
                    **where,
                    restart_count=recovery.restarts,
                    max_restarts=max_restarts,
                    reason=recovery.reason,
                )
            )

    def worker_started(self, worker: WorkerHandle) -> None:
        self._failed.discard(worker.process.pid)  # the number of one that failed long ago
        self._write(WorkerStarted(**self._where(worker.assignment.generation), **_who(worker)))

    def worker_exited(self, worker: WorkerHandle) -> None:
        code = worker.process.exit_code
        assert code is not None, f"worker {worker.id} still runs"
        self._write(WorkerExited(**self._where(worker.assignment.generation), **_who(worker), exit_code=code))

    def worker_failed(self, failure: ProcessFailure) -> None:
        """Count a worker that ended by itself though it should not have; those that were stopped because of it have
        not failed.

        One failure counts once: what a worker dies of because another was lost is counted apart, a process never twice.
        """
        if failure.pid in self._failed:
            return
        self._failed.add(failure.pid)
        self._write(
            WorkerFailed(
                **self._where(failure.generation),
                worker_id=failure.worker_id,
                rank=failure.rank,
                local_rank=failure.local_rank,
                pid=failure.pid,
                exit_code=failure.exitcode,
                cause=failure.cause,
                message=(failure.note or failure.message)[:MAX_MESSAGE],
                stderr=tuple(line[:MAX_MESSAGE] for line in failure.stderr_tail),
            )
        )

    def worker_replaced(self, old: WorkerHandle, new_id: str) -> None:
        where = self._where(old.assignment.generation)
        self._write(WorkerReplaced(**where, old_worker_id=old.id, worker_id=new_id, rank=old.assignment.rank))

    def worker_hung(self, worker: WorkerHandle, seconds: float, stacks: str = "") -> None:
        where = self._where(worker.assignment.generation)
        rank, told = worker.assignment.rank, stacks[-MAX_STACKS:]
        self._write(WorkerHung(**where, worker_id=worker.id, rank=rank, seconds=seconds, stacks=told))

    def went_back(self, generation: int, before: Setbacks, after: Setbacks) -> None:
        where = self._where(generation)
        self._write(
            JobWentBack(
                **where,
                from_step=after.last_from,
                to_step=after.last_to,
                count=after.count,
                num_new=after.count - before.count,
                num_repeated=after.num_steps - before.num_steps,
            )
        )

    def noticed(self, generation: int, notice: Notice) -> None:
        seconds = None if notice.at is None else max(0.0, notice.at - time.time())
        self._write(NodeNoticed(**self._where(generation), source=notice.source, reason=notice.reason, seconds=seconds))

    def asked(self, action: str, detail: str) -> None:
        """Somebody asked this agent for something through the store, and it does it, or says why not."""
        log.warning("asked through the store: %s: %s", action, detail)
        self._write(ActionAsked(**self._where(-1), action=action, detail=detail, by="the store"))

    def shut_down(self, reason: str, *, succeeded: bool) -> None:
        self._write(ShutDown(**self._where(self._generation), reason=reason, succeeded=succeeded))

    def close(self) -> None:
        self._log.close()
        self._metrics.close()

    def _where(self, generation: int) -> dict[str, Any]:
        return {"job": self._job, "generation": generation, "node_rank": self._node_rank}

    def _write(self, event: AnyEvent) -> None:
        self._log.write(event)
        measure(event, self._metrics)
        if self._watch is not None:
            self._watch.hear(event)

    write = _write
    """Tells of what a part of the agent saw by itself."""


def _who(worker: WorkerHandle) -> dict[str, Any]:
    assignment = worker.assignment
    return {
        "worker_id": worker.id,
        "rank": assignment.rank,
        "local_rank": assignment.local_rank,
        "pid": worker.process.pid,
    }
