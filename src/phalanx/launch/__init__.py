"""Start, watch, heal and stop the workers of a job: what torchrun's users know, and a little more.

Names are loaded on first use: the command line answers a wrong flag at once, and a worker's interpreter does not pay
for the agent.

>>> from phalanx.launch import LaunchConfig, elastic_launch        # doctest: +SKIP
>>> elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), train)()  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.launch._api import elastic_launch as elastic_launch
    from phalanx.launch._api import launch_agent as launch_agent
    from phalanx.launch._config import LaunchConfig as LaunchConfig
    from phalanx.launch._failures import ChildFailedError as ChildFailedError
    from phalanx.launch._failures import ProcessFailure as ProcessFailure
    from phalanx.launch._hang import report_progress as report_progress
    from phalanx.launch._health import HealthCheckServer as HealthCheckServer
    from phalanx.launch._health import create_healthcheck_server as create_healthcheck_server
    from phalanx.launch._local_agent import LocalElasticAgent as LocalElasticAgent
    from phalanx.launch._logs import DefaultLogsSpecs as DefaultLogsSpecs
    from phalanx.launch._logs import LogsDest as LogsDest
    from phalanx.launch._logs import LogsSpecs as LogsSpecs
    from phalanx.launch._logs import Std as Std
    from phalanx.launch._options import AgentOptions as AgentOptions
    from phalanx.launch._record import record as record
    from phalanx.launch._signals import SignalException as SignalException
    from phalanx.launch._spec import RunResult as RunResult
    from phalanx.launch._spec import Script as Script
    from phalanx.launch._spec import Worker as Worker
    from phalanx.launch._spec import WorkerGroup as WorkerGroup
    from phalanx.launch._spec import WorkerSpec as WorkerSpec
    from phalanx.launch._spec import WorkerState as WorkerState
    from phalanx.launch.metrics import MetricsConfig as MetricsConfig
    from phalanx.launch.numa import NumaOptions as NumaOptions
    from phalanx.launch.rendezvous import RendezvousHandler as RendezvousHandler
    from phalanx.launch.rendezvous import RendezvousParameters as RendezvousParameters

# Public name -> the module of this package that defines it.
_HOMES = {
    "AgentOptions": "_options",
    "ChildFailedError": "_failures",
    "DefaultLogsSpecs": "_logs",
    "HealthCheckServer": "_health",
    "LaunchConfig": "_config",
    "LocalElasticAgent": "_local_agent",
    "LogsDest": "_logs",
    "LogsSpecs": "_logs",
    "MetricsConfig": "metrics",
    "NumaOptions": "numa",
    "ProcessFailure": "_failures",
    "RendezvousHandler": "rendezvous",
    "RendezvousParameters": "rendezvous",
    "RunResult": "_spec",
    "Script": "_spec",
    "SignalException": "_signals",
    "Std": "_logs",
    "Worker": "_spec",
    "WorkerGroup": "_spec",
    "WorkerSpec": "_spec",
    "WorkerState": "_spec",
    "_get_addr_and_port": "_api",
    "_get_entrypoint_name": "_api",
    "create_healthcheck_server": "_health",
    "elastic_launch": "_api",
    "launch_agent": "_api",
    "record": "_record",
    "report_progress": "_hang",
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
