"""Offers the agent under the names and arguments that users of torch's elastic API know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from phalanx.launch.agent._node import NodeAgent
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._worker_spec import AgentOptions, RunResult, WorkerGroup, WorkerSpec
from phalanx.launch.telemetry._health import HealthCheckServer
from phalanx.launch.telemetry._logs import DefaultLogsSpecs, LogsSpecs
from phalanx.launch.workers._processes import Zygote
from phalanx.launch.workers._start import WorkerStart
from phalanx.protocol import timeouts


class LocalElasticAgent:
    """Runs the workers of one node.

    >>> agent = LocalElasticAgent(spec, DefaultLogsSpecs())          # doctest: +SKIP
    >>> agent.run().return_values[0]                                 # doctest: +SKIP

    ``options`` says what happens on failures; ``zygote`` is one that was forked before this process had threads.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | None = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = timeouts.EXIT_BARRIER,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = timeouts.SHUTDOWN,
        health_check_server: HealthCheckServer | None = None,
        *,
        options: AgentOptions | None = None,
        preload: Sequence[str] = (),
        standby: int | None = None,
        zygote: Zygote | None = None,
        metrics_cfg: Mapping[str, str] | None = None,
        signals: str | None = None,
    ) -> None:
        options = options or AgentOptions(shutdown_timeout=shutdown_timeout, exit_barrier_timeout=exit_barrier_timeout)
        config = LaunchConfig(
            **asdict(options),
            **_settings_of(spec),
            logs_specs=logs_specs or DefaultLogsSpecs(),
            start_method=start_method,
            log_line_prefix_template=log_line_prefix_template,
            preload=tuple(preload),
            standby=standby,
            metrics_cfg=dict(metrics_cfg or {}),
            signals_to_handle=signals or "",
        )
        self._spec = spec
        start = WorkerStart.choose(spec.entrypoint, spec.args, start_method)
        self._node = NodeAgent(config, start, spec.rdzv_handler, health=health_check_server, zygote=zygote)

    def run(self, role: str = "default") -> RunResult:
        """Run to the end; the values or failures of this node's workers. Once per agent."""
        return self._node.run()

    def get_worker_group(self, role: str = "default") -> WorkerGroup:
        """Return a snapshot of the workers and their state."""
        agent = self._node.agent
        group = WorkerGroup(spec=self._spec, workers=[], state=agent.state)
        if agent.current is None:
            return group
        info = agent.current.info
        group.workers = self._node.workers()
        group.group_rank, group.group_world_size = info.rank, info.world_size
        group.master_addr = info.bootstrap_store_info.master_addr
        group.master_port = info.bootstrap_store_info.master_port
        return group

    def alive_time(self) -> float:
        """Return when the agent's loop last came round; what a health check goes by."""
        return self._node.alive_time()

    @property
    def restart_count(self) -> int:
        """How many restarts the whole job has used."""
        current = self._node.agent.current
        return current.restarts if current else 0

    @property
    def is_in_exit_barrier(self) -> bool:
        """Whether this node is done and waits for the others."""
        return self._node.agent.is_in_exit_barrier


def _settings_of(spec: WorkerSpec) -> dict[str, Any]:
    """Return what a spec says, by the names of ``LaunchConfig``; how many nodes may come only its rendezvous knows."""
    same = {field.name: getattr(spec, field.name) for field in fields(LaunchConfig) if hasattr(spec, field.name)}
    own = {"max_nodes": spec.min_nodes, "nproc_per_node": spec.local_world_size}
    return {**same, **own, "run_id": spec.rdzv_handler.get_run_id()}
