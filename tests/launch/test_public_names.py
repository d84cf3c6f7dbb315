"""Freezes what users may import."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

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


# Names of a torch module that the one of ours has not: docs/parity.md says why, in their rows.
WITHOUT = {
    "multiprocessing.api": {"get_std_cm"},
    "rendezvous.c10d_rendezvous_backend": {"create_backend"},
    "rendezvous.etcd_server": {"find_free_port", "stop_etcd"},
}
ELASTIC_MODULES = [
    "agent.server", "agent.server.api", "agent.server.health_check_server", "agent.server.local_elastic_agent",
    "events", "events.api", "events.handlers", "metrics", "metrics.api", "multiprocessing", "multiprocessing.api",
    "multiprocessing.errors", "multiprocessing.errors.error_handler", "multiprocessing.errors.handlers", "rendezvous",
    "rendezvous.api", "rendezvous.c10d_rendezvous_backend", "rendezvous.dynamic_rendezvous", "rendezvous.etcd_server",
    "rendezvous.registry", "timer", "timer.api", "timer.file_based_local_timer", "timer.local_timer",
]  # fmt: skip
MODULES = {f"torch.distributed.elastic.{path}": f"phalanx.launch.{path}" for path in ELASTIC_MODULES} | {
    "torch.distributed.launcher": "phalanx.launch",
    "torch.distributed.launcher.api": "phalanx.launch.api",
}


@pytest.mark.parametrize("theirs", MODULES)
def test_torchs_module_names(theirs: str) -> None:
    """Who replaces only the beginning of a module's path finds what torch has there."""
    names = shown_by(importlib.import_module(theirs))
    assert names, f"{theirs} shows nothing"
    ours = importlib.import_module(MODULES[theirs])
    lacks = {name for name in names if not hasattr(ours, name)}
    assert lacks == WITHOUT.get(theirs.removeprefix("torch.distributed.elastic."), set())


def shown_by(module: ModuleType) -> set[str]:
    """The names in ``__all__``; without one, those that the module or a module of the package defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(module.__name__)
    }


CLASSES = [
    ("agent.server", "ElasticAgent"), ("agent.server", "SimpleElasticAgent"), ("agent.server", "WorkerSpec"),
    ("agent.server", "WorkerGroup"), ("agent.server", "Worker"), ("agent.server.api", "RunResult"),
    ("multiprocessing", "PContext"), ("multiprocessing", "RunProcsResult"),
    ("multiprocessing.errors", "ProcessFailure"), ("multiprocessing.errors", "ErrorHandler"),
    ("multiprocessing.errors", "ChildFailedError"), ("rendezvous", "RendezvousHandler"),
    ("rendezvous", "RendezvousParameters"), ("rendezvous", "RendezvousStoreInfo"),
    ("rendezvous.dynamic_rendezvous", "RendezvousBackend"), ("rendezvous.dynamic_rendezvous", "RendezvousTimeout"),
    ("rendezvous.dynamic_rendezvous", "DynamicRendezvousHandler"), ("timer", "TimerServer"),
    ("timer", "TimerClient"), ("timer", "FileTimerServer"), ("timer", "LocalTimerServer"), ("events", "Event"),
    ("events", "RdzvEvent"), ("metrics.api", "MetricStream"),
]  # fmt: skip
# ``run_once`` is a step of torch's loop for its own tests; ours looks when a timer is due.
MEMBERS_WITHOUT = {"FileTimerServer": {"run_once"}}


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_members_of_torchs_classes(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(f"torch.distributed.elastic.{module}"), name)
    ours = getattr(importlib.import_module(f"phalanx.launch.{module}"), name)
    named = {*dir(theirs), *getattr(theirs, "__annotations__", ())}
    members = {member for member in named if not member.startswith("_")}
    lacks = {m for m in members if not hasattr(ours, m) and m not in inspect.signature(ours).parameters}
    assert lacks == MEMBERS_WITHOUT.get(name, set())
