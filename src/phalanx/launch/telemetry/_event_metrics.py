"""Counts and times what events tell: the metrics of an agent are made from its stream of events."""

from __future__ import annotations

from phalanx.launch.events import (
    AnyEvent,
    GenerationEnded,
    GenerationFormed,
    JobWentBack,
    LimitReached,
    NodeNoticed,
    WorkerExited,
    WorkerFailed,
    WorkerHung,
    WorkerReplaced,
    WorkerStarted,
)
from phalanx.launch.metrics import Metrics
from phalanx.watch._goodput import LOST_CONTACT


def measure(event: AnyEvent, metrics: Metrics) -> None:
    """Put into ``metrics`` what an event says; an event that says nothing countable changes nothing."""
    if isinstance(event, GenerationFormed):
        metrics.put("rendezvous.duration.ms", event.seconds * 1e3, kind="timer")
        metrics.put("workers", event.num_workers)
        metrics.put("generation", event.generation)
    elif isinstance(event, GenerationEnded):
        metrics.count(f"generations.{event.how}")
    elif isinstance(event, WorkerStarted):
        metrics.count("workers.started")
    elif isinstance(event, WorkerExited):
        if event.exit_code == 0:
            metrics.count("workers.succeeded")
    elif isinstance(event, WorkerFailed):
        metrics.count("workers.lost_contact" if event.cause == LOST_CONTACT else "workers.failed")
    elif isinstance(event, WorkerReplaced):
        metrics.count("workers.replaced")
    elif isinstance(event, WorkerHung):
        metrics.count("workers.hung")
    elif isinstance(event, LimitReached):
        metrics.count(f"limits.{event.limit.replace(' ', '_')}")
    elif isinstance(event, NodeNoticed):
        metrics.count("nodes.noticed")
    elif isinstance(event, JobWentBack):
        metrics.count("job.went_back", event.num_new)
        metrics.count("job.steps_repeated", event.num_repeated)
