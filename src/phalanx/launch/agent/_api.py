"""Launching from Python: ``elastic_launch`` and ``launch_agent``.

Owns the way from a ``LaunchConfig`` to a running agent and from its result to values or an exception.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.launch.agent._local_agent import LocalElasticAgent, make_zygote
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._options import AgentOptions
from phalanx.launch.config._spec import Entrypoint, Script, WorkerSpec
from phalanx.launch.failures._process_failure import ChildFailedError
from phalanx.launch.rendezvous import get_rendezvous_handler
from phalanx.launch.rendezvous._interface import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
)
from phalanx.launch.telemetry._health import HealthCheckServer
from phalanx.launch.workers._processes import Zygote
from phalanx.launch.workers._start import WorkerStart

log = logging.getLogger(__name__)


class elastic_launch:
    """Run a function or a command on all workers of a job; call it with the arguments.

    >>> def train(lr):                                                     # doctest: +SKIP
    ...     return lr * 2
    >>> config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)  # doctest: +SKIP
    >>> elastic_launch(config, train)(0.5)                                 # doctest: +SKIP
    {0: 1.0, 1: 1.0}

    Raises ``ChildFailedError`` when the job failed and ``SignalException`` when it was told to end.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Entrypoint | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        if entrypoint is None:
            raise ValueError(
                "there is nothing to launch: the entrypoint is None; expected a function or a command"
            )
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any],
    health_check_server: HealthCheckServer | None = None,
    *,
    zygote: Zygote | None = None,
) -> dict[int, Any]:
    """Run this node's part of a job; return values of its workers by global rank. ``config`` stays as it is."""
    config = config.resolved()
    plan = WorkerStart.choose(entrypoint, tuple(args), config.start_method)
    plan.check()
    zygote = zygote or make_zygote(plan, config.preload, config.nproc_per_node)
    handler: RendezvousHandler | None = None
    try:
        handler = _make_handler(config)
        agent = _make_agent(config, plan, handler, health_check_server, zygote)
        result = agent.run()
    except RendezvousGracefulExitError as reason:
        log.warning("%s; this node computes nothing", reason)
        return {}
    finally:
        if handler is not None:
            handler.shutdown()
        zygote.close()
    if result.is_failed():
        failed = ChildFailedError(_get_entrypoint_name(entrypoint, list(args)), result.failures)
        raise failed from failed.get_first_failure()[1].exception
    return result.return_values


def _make_agent(
    config: LaunchConfig,
    plan: WorkerStart,
    handler: RendezvousHandler,
    health: HealthCheckServer | None,
    zygote: Zygote,
) -> LocalElasticAgent:
    master_addr, master_port = _get_addr_and_port(_rendezvous_parameters(config))
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=plan.entrypoint,
        args=plan.args,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
        min_nodes=config.min_nodes,
    )
    assert config.shutdown_timeout is not None, "a resolved config has a shutdown_timeout"
    options = AgentOptions(
        on_failure=config.on_failure,
        shutdown_timeout=config.shutdown_timeout,
        hang_timeout=config.hang_timeout,
        start_timeout=config.start_timeout,
    )
    return LocalElasticAgent(
        spec,
        config.logs_specs,
        plan.method,
        log_line_prefix_template=config.log_line_prefix_template,
        health_check_server=health,
        options=options,
        preload=config.preload,
        standby=config.standby,
        zygote=zygote,
        signals=config.signals_to_handle,
        metrics_cfg=config.metrics_cfg,
    )


def _make_handler(config: LaunchConfig) -> RendezvousHandler:
    return get_rendezvous_handler(_rendezvous_parameters(config))


def _rendezvous_parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def _get_entrypoint_name(entrypoint: Entrypoint | None, args: Sequence[Any]) -> str:
    """A name for reports: the function's, the script's, or the command's (for an interpreter: what it runs).

    >>> _get_entrypoint_name(sys.executable, ["-u", "train.py", "--lr", "1"])
    'train.py'
    """
    if entrypoint is None:
        return ""
    if isinstance(entrypoint, Script):
        return entrypoint.name
    if isinstance(entrypoint, str):
        if entrypoint == sys.executable:
            return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
        return entrypoint
    return str(getattr(entrypoint, "__name__", repr(entrypoint)))


def _get_addr_and_port(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """The fixed master address of a ``static`` rendezvous; other backends choose one for every generation.

    >>> _get_addr_and_port(RendezvousParameters("static", "node0:29500", "job", 1, 1))
    ('node0', 29500)
    """
    if parameters.backend != "static":
        return None, None
    endpoint = parameters.endpoint.strip()
    if not endpoint:
        raise ValueError("the static rendezvous has no endpoint; give --master-addr and --master-port")
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"the static endpoint {endpoint!r} has no port; give --master-port, or host:port")
    return host.strip("[]"), int(port)
