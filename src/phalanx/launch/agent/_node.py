"""Assembles the agent of a node from one configuration, runs it, and puts away what it has used.

Owns the zygote, signal handlers, the health check, the agent's folder and the event file. Every part is given the same
``LaunchConfig`` and takes from it what it needs.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile

from phalanx.launch.agent._agent import Agent
from phalanx.launch.agent._node_watch import NodeWatch
from phalanx.launch.agent._notices import NoticeWatch
from phalanx.launch.agent._observer import Observer
from phalanx.launch.agent._sources import Exited, Noticed, Signalled, Sources
from phalanx.launch.agent._status import count_run
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._worker_spec import RunResult, Worker
from phalanx.launch.rendezvous._adapted import AdaptedHandler
from phalanx.launch.rendezvous._backends import own_address
from phalanx.launch.rendezvous._interface import GenerationHandler
from phalanx.launch.rendezvous._settings import BUILT_IN_BACKENDS
from phalanx.launch.system._addresses import gloo_interface
from phalanx.launch.system._folders import OwnedFolder, RunningJob, open_agent_folder, register_job, sweep
from phalanx.launch.system._signals import choose_signals, handled
from phalanx.launch.telemetry._health import HealthCheckServer, health_server_from
from phalanx.launch.telemetry._logs import DefaultLogsSpecs
from phalanx.launch.timer._served import ENV_TIMER_FILE, timer_server_from
from phalanx.launch.timer.file_based_local_timer import FileTimerRequest, FileTimerServer
from phalanx.launch.workers._pool import WorkerPool
from phalanx.launch.workers._processes import Zygote
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._zygotes import Zygotes, make_zygote
from phalanx.protocol import ENV_EVENTS, ENV_LIVE_LINE

log = logging.getLogger(__name__)


class NodeAgent:
    """Runs this node's part of a job. ``config`` is resolved; ``zygote`` was forked before there were threads."""

    def __init__(
        self,
        config: LaunchConfig,
        start: WorkerStart,
        handler: GenerationHandler,
        *,
        health: HealthCheckServer | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        if config.on_failure == "heal" and isinstance(handler, AdaptedHandler):
            raise ValueError(
                f"on_failure is 'heal', but the rendezvous {handler.get_backend()!r} is not one of ours: survivors "
                "would not find the next generation; expected 'restart'"
            )
        self.config = config
        self._handler = handler
        self._notices = NoticeWatch(config.notice, lambda notice: self._sources.post(Noticed(notice)))
        signals = choose_signals(config.signals_to_handle, os.environ)
        self._signals = (*signals, *(signum for signum in self._notices.signals if signum not in signals))
        self._health = health or health_server_from(os.environ, self.alive_time)
        # Forked here, not in run(): the caller has no threads of ours yet, and with luck none of its own.
        zygotes = Zygotes.of(config, start, zygote or make_zygote(config, start))
        self._sources = Sources(handler)
        self.pool = WorkerPool(config, start, zygotes, lambda worker: self._sources.post(Exited(worker)))
        self._path = self._events_path()
        self.watch = NodeWatch(config, handler, self._path)
        self._observer = Observer.create(config, self._path, self.watch)
        self.agent = Agent(config, handler, self.pool, self._sources, self._observer)
        self._num_signals = 0

    def run(self) -> RunResult:
        """Run to the end; the values or failures of this node's workers. Once per node."""
        result: RunResult | None = None
        folder: OwnedFolder | None = None
        timers: FileTimerServer | None = None
        try:
            with handled(self._signals, self._on_signal):
                folder = self._open_folder()
                home = folder.path if folder else tempfile.gettempdir()
                timers = timer_server_from(os.environ, self._handler.get_run_id(), home, self._on_timer)
                env = ({ENV_TIMER_FILE: timers.path} if timers else {}) | self._gloo_interface()
                self.pool.open(folder.path if folder else "", env | self._start_watch(folder), self._notices.signals)
                self._start_health_check()
                self._notices.start()
                result = self.agent.departure.conclude(self.agent.run(), self._notices.signum)
                self._count(result)
                return result
        finally:
            self._notices.stop()
            if timers:
                timers.stop()
            if self._health:
                self._health.stop()
            self.pool.close()
            self._observe_last_exits()
            self.watch.stop()
            self._observer.close()
            if isinstance(self.config.logs_specs, DefaultLogsSpecs):
                self.config.logs_specs.close(keep=result is not None and result.is_failed())
            if folder is not None:
                folder.remove()

    def _gloo_interface(self) -> dict[str, str]:
        """Return the variable that has gloo listen where other nodes reach it, if it would else not."""
        config = self.config
        if config.max_nodes == 1 or config.rdzv_backend not in BUILT_IN_BACKENDS:
            return {}
        return gloo_interface(os.environ, config.local_addr or own_address(config.rdzv_backend, config.rdzv_endpoint))

    def _observe_last_exits(self) -> None:
        """Write the exits of those who were stopped at the very end, when the pool is closed."""
        while (event := self._sources.next(0)) is not None:
            if isinstance(event, Exited):
                self._observer.worker_exited(event.worker)

    def _start_watch(self, folder: OwnedFolder | None) -> dict[str, str]:
        """Begin to show the job; the variables that its workers need for it."""
        self.watch.tail_of, self.watch.alive = self.pool.stderr_tail_of, self.alive_time
        self.watch.write = self._observer.write
        if self.watch.terminal is not None:
            self.pool.show_on(self.watch.terminal)
        directory = self.watch.start(folder.path if folder else "")
        shown = {ENV_LIVE_LINE: "1"} if self.watch.terminal is not None else {}
        return {ENV_EVENTS: directory, **shown} if directory else {}

    def _count(self, result: RunResult) -> None:
        """Count the run in torch's words, for handlers that this process was given."""
        restarts = self.agent.current.restarts if self.agent.current else 0
        limit = self.config.max_restarts
        count_run(self.config.role, is_failed=result.is_failed(), restarts=min(restarts, limit), max_restarts=limit)

    def _open_folder(self) -> OwnedFolder | None:
        """Make this agent's own folder, with the job's name in it; also remove those of agents that were killed."""
        job = RunningJob(
            run_id=self._handler.get_run_id(),
            store_url=self._handler.store_url,
            secret_file=self._handler.secret_file,
            log_dir=os.path.abspath(os.path.dirname(self._path)) if self._path else "",
        )
        try:
            sweep()
            folder = open_agent_folder()
            if job.store_url:  # of a rendezvous of the user's own nothing is known yet
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

    def _on_timer(self, event: str, request: FileTimerRequest | None) -> None:
        """Note, before a worker is killed because its timer has expired, that this is why."""
        for worker in self.pool.running:
            if request is not None and request.signal > 0 and worker.process.pid == request.worker_pid:
                worker.note = f"its timer has expired: {request.scope_id}"

    def _events_path(self) -> str | None:
        specs = self.config.logs_specs
        if not isinstance(specs, DefaultLogsSpecs) or specs.is_temporary or specs.root_log_dir == os.devnull:
            return None
        run_dir = specs.run_log_dir(self.config.run_id)
        return None if run_dir == os.devnull else os.path.join(run_dir, "events.jsonl")

    def workers(self) -> list[Worker]:
        """Describe the workers as they are now."""
        assignments = [(worker.assignment, worker.process.pid) for worker in list(self.pool.workers.values())]
        return [
            Worker(
                local_rank=assignment.local_rank,
                global_rank=assignment.rank,
                role_rank=assignment.role_rank,
                world_size=assignment.world_size,
                role_world_size=assignment.role_size,
                id=pid,
            )
            for assignment, pid in assignments
        ]

    def alive_time(self) -> float:
        """Return when the agent's loop last came round; what a health check goes by."""
        return self.agent.alive_at

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._notices.take_signal(signum):
            return
        self._num_signals += 1
        if self._num_signals > 1:
            self.pool.hurry()
        else:
            self._sources.post(Signalled(signum))
