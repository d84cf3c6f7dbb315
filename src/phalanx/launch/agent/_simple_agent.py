"""Lets users write an agent of their own: how workers are started, watched and stopped is theirs, the rest is here.

Owns ``ElasticAgent`` (what every agent offers) and ``SimpleElasticAgent``, a loop that looks at its workers every
``monitor_interval`` seconds. The nodes of a job agree through the same rendezvous as those of ``LocalElasticAgent``,
which reacts to events instead. Restarts are counted by each agent for itself, as by torch's; a generation that another
node ends, or that nodes wait to join, costs none.
"""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.errors import StoreError
from phalanx.launch.agent._status import count_run, state_of, status_event
from phalanx.launch.config._worker_spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from phalanx.launch.events import Event, EventSource, record
from phalanx.launch.metrics import prof, put_metric
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.rendezvous._adapted import AdaptedHandler, adapted
from phalanx.launch.rendezvous._interface import (
    GenerationWatch,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
)
from phalanx.launch.system._signals import SignalException
from phalanx.protocol import Broken, agents_prefix, timeouts

log = logging.getLogger(__name__)

DEFAULT_ROLE = "default"


class ElasticAgent(ABC):
    """Runs the workers of a node."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run to the end; the values or failures of this node's workers, by global rank."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers and their state."""


class SimpleElasticAgent(ElasticAgent):
    """An agent whose workers are what you make of them: derive from it and give it four methods."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = timeouts.EXIT_BARRIER,
        shutdown_timeout: float = timeouts.SHUTDOWN,
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        self._handler = adapted(spec.rdzv_handler)
        self._name = f"{socket.gethostname()}.{secrets.token_hex(3)}"
        self._info: RendezvousInfo | None = None
        self._watch: GenerationWatch | None = None

    # -- yours -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of the group; what you know each by, by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers of the group, whatever state they are in."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers, and say at once how they are."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Give up everything that was started; called once, at the end."""

    # -- the loop --------------------------------------------------------------------------------------------------

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        started = time.monotonic()
        death_sig = signal.SIGTERM
        try:
            result = self._invoke_run(role)
            self._total_execution_time = int(time.monotonic() - started)
            self._tell(result)
            return result
        except RendezvousGracefulExitError as reason:
            log.warning("%s; this node computes nothing", reason)
            return RunResult(WorkerState.SUCCEEDED)
        except SignalException as error:
            death_sig = error.sigval
            raise
        finally:
            self._shutdown(death_sig, timeout=int(self._shutdown_timeout))
            self._leave_generation()
            if isinstance(self._handler, AdaptedHandler):
                self._handler.release()
            self._total_execution_time = int(time.monotonic() - started)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            put_metric(f"workers.{group.spec.role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{group.spec.role}.{result.state.name.lower()}", 1)
            if result.state is WorkerState.SUCCEEDED:
                self._exit_barrier()
                return result
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                if not self._restart_after(result):
                    return result
            elif result.state is WorkerState.HEALTHY:
                self._look_at_generation()
            else:
                raise RuntimeError(f"the workers of role {group.spec.role!r} are said to be {result.state.name}")

    def _restart_after(self, result: RunResult) -> bool:
        """Start all workers anew after a failure; False when no restart is left, and the job is over."""
        group, generation = self._worker_group, self._formed.generation
        first = min(result.failures.items(), key=lambda item: item[1].precedence, default=None)
        reason = f"rank {first[0]}: {first[1].message}" if first else f"workers are {result.state.name}"
        if self._remaining_restarts <= 0:
            self._stop_workers(group)
            group.state = WorkerState.FAILED
            self._handler.close_as("failed", reason)
            return False
        log.warning("%s; %d of %d restarts left", reason, self._remaining_restarts, group.spec.max_restarts)
        self._remaining_restarts -= 1
        self._handler.break_generation(generation, Broken(reason=reason))
        self._restart_workers(group)
        return True

    def _look_at_generation(self) -> None:
        """Start the workers anew when the generation is over: another node has failed, or nodes wait to join."""
        end = self._watch.wait(0) if self._watch else None
        if end is None:
            return
        if end.kind == "closed":
            self._stop_workers(self._worker_group)
            self._worker_group.state = WorkerState.STOPPED
            raise RendezvousClosedError(f"the job ended while workers ran here: {end.reason}")
        log.warning("generation %d is over (%s): the workers start anew", self._formed.generation, end)
        if end.kind == "wanted":
            self._handler.break_generation(self._formed.generation, Broken(reason=end.reason))
        self._restart_workers(self._worker_group)

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, and start those of the next generation."""
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Form a generation and start its workers here."""
        self._rendezvous(worker_group)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            self._record(self._event("START", EventSource.WORKER, worker))
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the next generation; ranks, addresses and the store are then in ``worker_group``."""
        spec = worker_group.spec
        self._leave_generation()
        size = spec.local_world_size
        self._handler.set_local_size(size, tuple(f"{self._name}.{rank}" for rank in range(size)), spec.role)
        with self.record_duration("RENDEZVOUS"):
            self._info = info = self._handler.next_rendezvous()
        self._watch = self._handler.watch_generation(info.generation)
        role_base, role_size = info.role_place()
        worker_group.workers = [
            Worker(rank, info.node.base_rank + rank, role_base + rank, info.num_workers, role_size)
            for rank in range(size)
        ]
        worker_group.group_rank, worker_group.group_world_size = info.rank, info.world_size
        worker_group.master_addr = spec.master_addr or info.bootstrap_store_info.master_addr
        worker_group.master_port = spec.master_port or info.bootstrap_store_info.master_port
        # Under the generation's own prefix: what dead workers wrote is never read by living ones.
        worker_group.store = self._store = info.store.as_c10d(agents_prefix(info.generation))

    def _leave_generation(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def _formed(self) -> RendezvousInfo:
        assert self._info is not None, "no worker runs before the first generation"
        return self._info

    def _exit_barrier(self) -> None:
        """Wait until the workers of all nodes are done, ``exit_barrier_timeout`` seconds at most."""
        info, channel = self._formed, AgentChannel(self._formed.store)
        self._in_exit_barrier = True
        try:
            channel.say_done(info.generation, info.rank, "done")
            if info.world_size > 1:
                channel.wait_done(info.generation, info.world_size, "done", self._exit_barrier_timeout)
        except StoreError as error:
            log.warning("not all nodes said that they are done: %s", error)
        finally:
            self._in_exit_barrier = False

    # -- telling ---------------------------------------------------------------------------------------------------

    def get_event_failed(self) -> Event:
        """Return an event that says that this agent has failed, by the exception that is being handled."""
        return self._event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """Return an event that says that this agent is done."""
        return self._event("SUCCEEDED", EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Write an event that says how long the block took."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._record(self._event(state, EventSource.AGENT, duration_ms=(time.perf_counter() - started) * 1e3))

    def _event(self, state: str, source: EventSource, worker: Worker | None = None, **more: Any) -> Event:
        restarts = self._worker_group.spec.max_restarts - self._remaining_restarts
        so_far = {"total_run_time": self._total_execution_time, "agent_restarts": restarts}
        return status_event(self._worker_group, state, source, worker, **so_far, **more)

    def _record(self, event: Event) -> None:
        record(event, self._worker_group.spec.event_log_handler)

    def _tell(self, result: RunResult) -> None:
        spec = self._worker_group.spec
        restarts = spec.max_restarts - self._remaining_restarts
        count_run(spec.role, is_failed=result.is_failed(), restarts=restarts, max_restarts=spec.max_restarts)
        for worker in self._worker_group.workers:
            self._record(self._event(state_of(worker, result), EventSource.WORKER, worker))
