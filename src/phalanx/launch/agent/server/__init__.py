"""Offers agents under the path that users of torch know: ``torch.distributed.elastic.agent.server``."""

from __future__ import annotations

from phalanx.launch.agent._local_agent import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_HEALTH_CHECK_PORT,
    TORCHELASTIC_TIMER_FILE,
    TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
    LocalElasticAgent,
)
from phalanx.launch.agent._simple_agent import ElasticAgent, SimpleElasticAgent
from phalanx.launch.config._worker_spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from phalanx.launch.telemetry._health import HealthCheckServer, create_healthcheck_server

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "ElasticAgent",
    "HealthCheckServer",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "create_healthcheck_server",
]
