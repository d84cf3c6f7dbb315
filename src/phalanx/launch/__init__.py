"""Starts, watches, heals and stops the workers of a job: what torchrun's users know, and a little more.

Names are loaded on first use: the command line answers a wrong flag at once, and a worker's interpreter does not pay
for the agent.

>>> from phalanx.launch import LaunchConfig, elastic_launch        # doctest: +SKIP
>>> elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), train)()  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.launch.agent._launch import elastic_launch as elastic_launch
    from phalanx.launch.agent._launch import launch_agent as launch_agent
    from phalanx.launch.agent._local_agent import LocalElasticAgent as LocalElasticAgent
    from phalanx.launch.config._config import LaunchConfig as LaunchConfig
    from phalanx.launch.config._worker_spec import AgentOptions as AgentOptions
    from phalanx.launch.config._worker_spec import RunResult as RunResult
    from phalanx.launch.config._worker_spec import Script as Script
    from phalanx.launch.config._worker_spec import Worker as Worker
    from phalanx.launch.config._worker_spec import WorkerGroup as WorkerGroup
    from phalanx.launch.config._worker_spec import WorkerSpec as WorkerSpec
    from phalanx.launch.config._worker_spec import WorkerState as WorkerState
    from phalanx.launch.failures._process_failure import ChildFailedError as ChildFailedError
    from phalanx.launch.failures._process_failure import ProcessFailure as ProcessFailure
    from phalanx.launch.failures._recording import record as record
    from phalanx.launch.hang._detector import report_progress as report_progress
    from phalanx.launch.metrics import MetricsConfig as MetricsConfig
    from phalanx.launch.numa import NumaOptions as NumaOptions
    from phalanx.launch.rendezvous import RendezvousHandler as RendezvousHandler
    from phalanx.launch.rendezvous import RendezvousParameters as RendezvousParameters
    from phalanx.launch.system._signals import SignalException as SignalException
    from phalanx.launch.telemetry._health import HealthCheckServer as HealthCheckServer
    from phalanx.launch.telemetry._health import create_healthcheck_server as create_healthcheck_server
    from phalanx.launch.telemetry._logs import DefaultLogsSpecs as DefaultLogsSpecs
    from phalanx.launch.telemetry._logs import LogsDest as LogsDest
    from phalanx.launch.telemetry._logs import LogsSpecs as LogsSpecs
    from phalanx.launch.telemetry._logs import Std as Std

# Public name -> the module of this package that defines it.
_HOMES = {
    "AgentOptions": "config._worker_spec",
    "ChildFailedError": "failures._process_failure",
    "DefaultLogsSpecs": "telemetry._logs",
    "HealthCheckServer": "telemetry._health",
    "LaunchConfig": "config._config",
    "LocalElasticAgent": "agent._local_agent",
    "LogsDest": "telemetry._logs",
    "LogsSpecs": "telemetry._logs",
    "MetricsConfig": "metrics",
    "NumaOptions": "numa",
    "ProcessFailure": "failures._process_failure",
    "RendezvousHandler": "rendezvous",
    "RendezvousParameters": "rendezvous",
    "RunResult": "config._worker_spec",
    "Script": "config._worker_spec",
    "SignalException": "system._signals",
    "Std": "telemetry._logs",
    "Worker": "config._worker_spec",
    "WorkerGroup": "config._worker_spec",
    "WorkerSpec": "config._worker_spec",
    "WorkerState": "config._worker_spec",
    "_get_addr_and_port": "agent._launch",
    "_get_entrypoint_name": "agent._launch",
    "create_healthcheck_server": "telemetry._health",
    "elastic_launch": "agent._launch",
    "launch_agent": "agent._launch",
    "record": "failures._recording",
    "report_progress": "hang._detector",
}

__all__ = [name for name in _HOMES if not name.startswith("_")]


if not TYPE_CHECKING:  # a checker would take every name from it, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(import_module(f"phalanx.launch.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'phalanx.launch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
