"""Offers agents under the path that users of torch know: ``torch.distributed.elastic.agent.server.api``."""

from __future__ import annotations

from phalanx.launch.agent._simple_agent import ElasticAgent, SimpleElasticAgent
from phalanx.launch.config._worker_spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
