"""Tells of workers in torch's words: status events, and the counters of a run in the group ``torchelastic``.

What an agent tells in our own words is ``_observer``'s.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from phalanx.launch.config._worker_spec import RunResult, Worker, WorkerGroup
from phalanx.launch.events import Event, EventSource
from phalanx.launch.metrics import put_metric


def status_event(
    group: WorkerGroup, state: str, source: EventSource, worker: Worker | None = None, **more: Any
) -> Event:
    """Return the event ``torchelastic.worker.status.<state>`` of a group of workers, or of one of them."""
    spec = group.spec
    about: dict[str, Any] = {"group_world_size": group.group_world_size, "entry_point": spec.get_entrypoint_name()}
    if worker is not None:
        about |= {name: getattr(worker, name) for name in ("local_rank", "role_rank", "role_world_size")}
    return Event(
        f"torchelastic.worker.status.{state}",
        source,
        metadata={
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": worker.global_rank if worker else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker else None,
            "role": spec.role,
            "hostname": socket.getfqdn(),
            "state": state,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "metadata": json.dumps(about),
            "raw_error": None,
            "duration_ms": None,
            **more,
        },
    )


def count_run(role: str, *, is_failed: bool, restarts: int, max_restarts: int) -> None:
    """Count how a run has ended."""
    flakiness = 100.0 if is_failed else 100.0 * restarts / (max_restarts + 1)
    put_metric(f"workers.{role}.flakiness", int(flakiness))
    put_metric(f"workers.{role}.run_total", 1)
    for outcome, is_it in (("success", not is_failed), ("failed", is_failed)):
        put_metric(f"workers.{role}.run_{outcome}_with_retries", int(is_it and restarts > 0))
        put_metric(f"workers.{role}.run_{outcome}_no_retries", int(is_it and restarts == 0))


def state_of(worker: Worker, result: RunResult) -> str:
    """Return what became of one worker: the agent has ended those that are in no list."""
    if worker.global_rank in result.failures or worker.global_rank in result.return_values:
        return result.state.value
    return "TERMINATED" if result.is_failed() else result.state.value
