"""Launches jobs from Python: ``elastic_launch`` and ``launch_agent``.

Owns the way from a ``LaunchConfig`` to a running agent and from its result to values or an exception.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.launch.agent._node import NodeAgent
from phalanx.launch.config._config import LaunchConfig, static_address
from phalanx.launch.config._worker_spec import Entrypoint, Script
from phalanx.launch.failures._process_failure import ChildFailedError
from phalanx.launch.rendezvous import get_rendezvous_handler
from phalanx.launch.rendezvous._adapted import adapted
from phalanx.launch.rendezvous._interface import (
    GenerationHandler,
    RendezvousGracefulExitError,
    RendezvousParameters,
)
from phalanx.launch.telemetry._health import HealthCheckServer
from phalanx.launch.workers._processes import Zygote
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._zygotes import make_zygote

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
            raise ValueError("there is nothing to launch: the entrypoint is None; expected a function or a command")
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
    start = WorkerStart.choose(entrypoint, tuple(args), config.start_method)
    start.check()
    return run_node(config, start, health=health_check_server, zygote=zygote)


def run_node(
    config: LaunchConfig,
    start: WorkerStart,
    *,
    health: HealthCheckServer | None = None,
    zygote: Zygote | None = None,
) -> dict[int, Any]:
    """Run this node's part of a job by a resolved configuration; return values of its workers by global rank."""
    zygote = zygote or make_zygote(config, start)
    handler: GenerationHandler | None = None
    try:
        handler = adapted(get_rendezvous_handler(_rendezvous_parameters(config)))
        result = NodeAgent(config, start, handler, health=health, zygote=zygote).run()
    except RendezvousGracefulExitError as reason:
        log.warning("%s; this node computes nothing", reason)
        return {}
    finally:
        if handler is not None:
            handler.shutdown()
        zygote.close()
    if result.is_failed():
        failed = ChildFailedError(_get_entrypoint_name(start.entrypoint, list(start.args)), result.failures)
        raise failed from failed.get_first_failure()[1].exception
    return result.return_values


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
    """Return a name for reports: the function's, the script's, or the command's (for an interpreter: what it runs).

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
    """Return the fixed master address of a ``static`` rendezvous; other backends choose one for every generation.

    >>> _get_addr_and_port(RendezvousParameters("static", "node0:29500", "job", 1, 1))
    ('node0', 29500)
    """
    if parameters.backend != "static":
        return None, None
    return static_address(parameters.endpoint)
