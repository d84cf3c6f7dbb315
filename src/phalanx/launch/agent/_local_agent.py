"""The agent as users of torch's elastic API build it, and the assembly of its parts.

Owns ``LocalElasticAgent``: which zygote for which start method, the pool's options, signal handlers, the health check.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from phalanx.launch.agent._agent import Agent
from phalanx.launch.agent._observer import Observer
from phalanx.launch.agent._sources import Exited, Signalled, Sources
from phalanx.launch.config._options import AgentOptions
from phalanx.launch.config._spec import RunResult, Worker, WorkerGroup, WorkerSpec
from phalanx.launch.system._folders import OwnedFolder, RunningJob, open_agent_folder, register_job, sweep
from phalanx.launch.system._signals import choose_signals, handled
from phalanx.launch.telemetry._health import HealthCheckServer, health_server_from
from phalanx.launch.telemetry._logs import DefaultLogsSpecs, LogsSpecs
from phalanx.launch.workers._environment import thread_defaults
from phalanx.launch.workers._pool import PoolOptions, WorkerPool
from phalanx.launch.workers._processes import Zygote
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._zygotes import Zygotes

log = logging.getLogger(__name__)

WARM_IMPORTS = ("torch", "torch.distributed")


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
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: HealthCheckServer | None = None,
        *,
        options: AgentOptions | None = None,
        preload: Sequence[str] = (),
        standby: int = 0,
        zygote: Zygote | None = None,
        metrics_cfg: Mapping[str, str] | None = None,
        signals: str | None = None,
    ) -> None:
        self._plan = WorkerStart.choose(spec.entrypoint, spec.args, start_method)
        self._logs_specs = logs_specs or DefaultLogsSpecs()
        self._signals = choose_signals(signals, os.environ)
        self._health = health_check_server or health_server_from(os.environ, self.alive_time)
        # Forked here, not in run(): the caller has no threads of ours yet, and with luck none of its own.
        self._zygote = zygote or make_zygote(self._plan, tuple(preload), spec.local_world_size)
        self._sources = Sources(spec.rdzv_handler)
        pool_options = PoolOptions(
            plan=self._plan,
            logs_specs=self._logs_specs,
            prefix_template=log_line_prefix_template,
            stdout_filters=tuple(spec.duplicate_stdout_filters or ()),
            stderr_filters=tuple(spec.duplicate_stderr_filters or ()),
            standby=standby,
            cpus_of=_binding(spec),
        )
        zygotes = Zygotes(
            self._zygote,
            successor_maker(self._plan, tuple(preload), spec.local_world_size),
            is_warm=self._plan.is_warm,
        )
        self._pool = WorkerPool(zygotes, pool_options, lambda member: self._sources.post(Exited(member)))
        options = options or AgentOptions(
            shutdown_timeout=shutdown_timeout, exit_barrier_timeout=exit_barrier_timeout
        )
        self._observer = Observer.create(
            spec.rdzv_handler.get_run_id(), self._events_path(spec), spec.event_log_handler, metrics_cfg or {}
        )
        self._agent = Agent(spec, self._pool, self._sources, options, self._observer)
        self._num_signals = 0

    def run(self, role: str = "default") -> RunResult:
        """Run to the end; the values or failures of this node's workers. Once per agent."""
        result: RunResult | None = None
        folder: OwnedFolder | None = None
        try:
            with handled(self._signals, self._on_signal):
                folder = self._open_folder()
                self._pool.open(folder.path if folder else "")
                self._start_health_check()
                result = self._agent.run()
                return result
        finally:
            if self._health:
                self._health.stop()
            self._pool.close()
            self._agent.observe_last_exits()
            self._observer.close()
            if isinstance(self._logs_specs, DefaultLogsSpecs):
                self._logs_specs.close(keep=result is not None and result.is_failed())
            if folder is not None:
                folder.remove()

    def _open_folder(self) -> OwnedFolder | None:
        """This agent's own folder, with the job's name in it; also removes those of agents that were killed."""
        handler = self._agent.spec.rdzv_handler
        job = RunningJob(
            run_id=handler.get_run_id(), store_url=handler.store_url, secret_file=handler.secret_file
        )
        try:
            sweep()
            folder = open_agent_folder()
            register_job(folder, job)
        except OSError as error:  # a full disk: workers then make folders of their own where they can
            log.warning("no folder for this agent, so that phalanx scale must be told of the job: %s", error)
            return None
        return folder

    def _start_health_check(self) -> None:
        if self._health is None:
            return
        try:
            self._health.start()
        except OSError as error:  # most often its port is another's: the job can do without
            log.warning("no health check: it cannot listen on port %d: %s", self._health.port, error)
            self._health = None

    def _events_path(self, spec: WorkerSpec) -> str | None:
        specs = self._logs_specs
        if not isinstance(specs, DefaultLogsSpecs) or specs.is_temporary or specs.root_log_dir == os.devnull:
            return None
        run_dir = specs.run_log_dir(spec.rdzv_handler.get_run_id())
        return None if run_dir == os.devnull else os.path.join(run_dir, "events.jsonl")

    def get_worker_group(self, role: str = "default") -> WorkerGroup:
        """A snapshot of the workers and their state."""
        agent = self._agent
        info = agent.current.info if agent.current else None
        group = WorkerGroup(spec=agent.spec, workers=[], state=agent.state)
        if info is None:
            return group
        group.group_rank, group.group_world_size = info.rank, info.world_size
        group.master_addr = info.bootstrap_store_info.master_addr
        group.master_port = info.bootstrap_store_info.master_port
        for member in list(self._pool.members.values()):
            place = member.place
            group.workers.append(
                Worker(
                    local_rank=place.local_rank,
                    global_rank=place.rank,
                    role_rank=place.role_rank,
                    world_size=place.world_size,
                    role_world_size=place.role_size,
                    id=member.process.pid,
                )
            )
        return group

    def alive_time(self) -> float:
        """When the agent's loop last came round; what a health check goes by."""
        return self._agent.alive_at

    @property
    def restart_count(self) -> int:
        """How many restarts the whole job has used."""
        return self._agent.current.restarts if self._agent.current else 0

    @property
    def is_in_exit_barrier(self) -> bool:
        """Whether this node is done and waits for the others."""
        return self._agent.is_in_exit_barrier

    def _on_signal(self, signum: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._pool.hurry()
        else:
            self._sources.post(Signalled(signum))


def make_zygote(plan: WorkerStart, preload: tuple[str, ...], local_size: int) -> Zygote:
    """The zygote that a plan needs. Only ``fork`` copies this process; the others start from a clean interpreter."""
    if plan.is_function and plan.method == "fork":
        return Zygote.fork({"main": (plan.entrypoint, plan.args)}, preload)
    env = {**os.environ, **thread_defaults(local_size, os.environ)}
    if plan.is_warm:
        return Zygote.execute((*WARM_IMPORTS, *preload), env)
    return Zygote.execute((), env)


def successor_maker(
    plan: WorkerStart, preload: tuple[str, ...], local_size: int
) -> Callable[[bool], Zygote] | None:
    """How to start another zygote, warm or not, in place of one that was killed; None when there can be none."""
    if plan.is_function and plan.method == "fork":
        return None
    return lambda is_warm: make_zygote(plan if is_warm else plan.cold(), preload, local_size)


def _binding(spec: WorkerSpec) -> Callable[[int, int], Sequence[int]]:
    if spec.numa_options is None:
        return lambda local_rank, local_size: ()
    from phalanx.launch import numa  # start-up speed: few ask for it

    options = spec.numa_options
    return lambda local_rank, local_size: sorted(numa.cpus_for(options, local_rank, local_size))
