"""Freezes what users may import."""

from __future__ import annotations

import pytest

import phalanx.launch
from phalanx.launch import rendezvous

pytestmark = pytest.mark.fast


def test_public_names():
    assert sorted(phalanx.launch.__all__) == [
        "AgentOptions", "ChildFailedError", "DefaultLogsSpecs", "HealthCheckServer", "LaunchConfig",
        "LocalElasticAgent", "LogsDest", "LogsSpecs", "MetricsConfig", "NumaOptions", "ProcessFailure",
        "RendezvousHandler", "RendezvousParameters", "RunResult", "Script", "SignalException", "Std", "Worker",
        "WorkerGroup", "WorkerSpec", "WorkerState", "create_healthcheck_server", "elastic_launch", "launch_agent",
        "record", "report_progress",
    ]  # fmt: skip
    for name in phalanx.launch.__all__:
        assert getattr(phalanx.launch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        phalanx.launch.nonsense  # noqa: B018


def test_public_names_of_rendezvous():
    assert sorted(rendezvous.__all__) == [
        "GenerationEnd", "GenerationHandler", "GenerationWatch", "NodeInfo", "RendezvousClosedError",
        "RendezvousConnectionError", "RendezvousError", "RendezvousGracefulExitError", "RendezvousHandler",
        "RendezvousHandlerCreator", "RendezvousHandlerRegistry", "RendezvousInfo", "RendezvousParameters",
        "RendezvousStateError", "RendezvousStoreInfo", "RendezvousTimeoutError", "get_rendezvous_handler",
        "rendezvous_handler_registry",
    ]  # fmt: skip
    for name in rendezvous.__all__:
        assert getattr(rendezvous, name) is not None
