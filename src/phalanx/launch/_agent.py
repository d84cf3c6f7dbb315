"""The agent of a node: one loop that takes events one by one, asks the policy, and acts.

Guarantees: only this loop (the caller's thread) starts, stops and judges workers, so nothing here needs a lock; an
exit is acted upon when it happens, not at a polling interval; every generation ends by one verdict that all agents
share (``_journal``); whatever way ``run`` is left, no worker remains.
Assumptions: ``_sources`` threads only post events; the rendezvous agrees on members, this class never does.
Rejected: a thread per worker (signals, ordering); waiting for the rendezvous in this thread (a worker may die or a
signal come meanwhile).
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.comm.stores import TCPStore
from phalanx.errors import StoreError
from phalanx.launch import _policy
from phalanx.launch._crew import Crew, CrewMember
from phalanx.launch._environment import JobFacts, Place
from phalanx.launch._failures import ProcessFailure
from phalanx.launch._hang import HangDetector
from phalanx.launch._journal import Journal
from phalanx.launch._policy import Action, Situation, Verdict
from phalanx.launch._signals import SignalException
from phalanx.launch._sources import AllDone, Ended, Event, Exited, Formed, JoinFailed, Requested, Signalled, Sources
from phalanx.launch._spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from phalanx.launch.rendezvous._interface import (
    GenerationEnd,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
)
from phalanx.membership import Broken

log = logging.getLogger(__name__)

Emit = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """How an agent treats its workers."""

    on_failure: str = "restart"
    shutdown_timeout: float = 30.0
    exit_barrier_timeout: float = 300.0
    hang_timeout: float = 0.0
    """0: no detection."""

    def __post_init__(self) -> None:
        if self.on_failure not in ("restart", "heal"):
            raise ValueError(f"on_failure is {self.on_failure!r}; expected restart or heal")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}; expected 0 or more seconds")


class Agent:
    """Runs the workers of a ``WorkerSpec`` to their end. ``emit(kind, **fields)`` hears of every change."""

    def __init__(self, spec: WorkerSpec, crew: Crew, sources: Sources, options: AgentOptions, emit: Emit) -> None:
        self.spec = spec
        self.state = WorkerState.INIT
        self.restarts = 0
        self.info: RendezvousInfo | None = None
        self.is_in_exit_barrier = False
        self._handler = spec.rdzv_handler
        self._crew = crew
        self._sources = sources
        self._options = options
        self._emit = emit
        self._heals = options.on_failure == "heal"
        self._journal: Journal | None = None
        self._bootstrap: TCPStore | None = None
        self._is_joining = False
        self._size = spec.local_world_size
        self._ids: list[str] = []
        self._running_on = -1
        """The generation before, when its workers were to leave it at a step boundary."""
        self._prefix = f"{socket.gethostname()}.{secrets.token_hex(3)}"
        self._count = 0
        self._values: dict[int, Any] = {}
        self._failures: dict[str, ProcessFailure] = {}
        self._hang = HangDetector(options.hang_timeout) if options.hang_timeout > 0 else None
        self._are_stacks_dumped = False
        self._result: RunResult | None = None

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Take part in the job until it is over. Leaves no worker behind, however it is left."""
        try:
            self._ids = self._new_ids(self._size)
            self._join()
            while self._result is None:
                event = self._sources.next(self.spec.monitor_interval)
                if event is not None:
                    self._take(event)
            return self._result
        finally:
            self._sources.leave_generation()
            self._crew.stop(signal.SIGTERM, self._options.shutdown_timeout)
            self._close_bootstrap()

    def _take(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._on_exit(event.member)
        elif isinstance(event, Formed):
            self._on_formed(event.info)
        elif isinstance(event, JoinFailed):
            self._on_join_failed(event.error)
        elif isinstance(event, Signalled):
            self._on_signal(event.signum)
        elif self._is_joining or self.info is None or event.generation != self.info.generation:
            pass  # about a generation that this node has left already
        elif isinstance(event, Ended):
            self._on_end(event.end)
        elif isinstance(event, Requested):
            self._on_request(event)
        elif isinstance(event, AllDone):
            self._on_all_done(event)

    # -- forming a generation ------------------------------------------------------------------------------------

    def _new_ids(self, count: int) -> list[str]:
        self._count += count
        return [f"{self._prefix}.{number}" for number in range(self._count - count, self._count)]

    def _join(self) -> None:
        """Ask for the next generation with the workers in ``_ids``; fork those that are new meanwhile."""
        self._is_joining = True
        self._handler.set_local_size(len(self._ids), tuple(self._ids))
        self._sources.join()
        self._crew.prepare(sum(worker_id not in self._crew.members for worker_id in self._ids))

    def _on_formed(self, info: RendezvousInfo) -> None:
        self._is_joining = False
        self.info = info
        self._journal = Journal(info.store)
        self.restarts = self._journal.restarts_before(info.generation)
        if not self._serve_bootstrap(info):
            self._end_generation(_policy.on_membership_change(self._situation(), reason="the bootstrap port was taken"))
            return
        places = self._places(info)
        self._crew.start([place for place in places if place.worker_id not in self._crew.members], self._job_facts())
        for place in places:
            self._crew.members[place.worker_id].place = place
        self.state = WorkerState.HEALTHY
        self._are_stacks_dumped = False
        if self._hang:
            self._hang.reset(time.monotonic())
        self._sources.follow(info, max(self.spec.monitor_interval, 0.1), self._watched_ids)
        self._emit(
            "generation_formed", generation=info.generation, node_rank=info.rank, num_nodes=info.world_size,
            num_workers=info.num_workers, restarts=self.restarts,
        )  # fmt: skip
        for member in list(self._crew.members.values()):  # who died while the generation was being agreed upon
            if not member.is_running and member.id in self._ids:
                self._judge_exit(member)

    def _places(self, info: RendezvousInfo) -> list[Place]:
        node, store = info.node, info.bootstrap_store_info
        return [
            Place(
                worker_id=worker_id,
                rank=node.base_rank + local_rank,
                local_rank=local_rank,
                world_size=info.num_workers,
                local_size=node.local_size,
                node_rank=info.rank,
                num_nodes=info.world_size,
                generation=info.generation,
                master_addr=self.spec.master_addr or store.master_addr,
                master_port=store.master_port,
                store_url=self._handler.store_url,
            )
            for local_rank, worker_id in enumerate(node.worker_ids)
        ]

    def _job_facts(self) -> JobFacts:
        return JobFacts(
            run_id=self._handler.get_run_id(),
            role=self.spec.role,
            restarts=self.restarts,
            max_restarts=self.spec.max_restarts,
            on_failure=self._options.on_failure,
            use_agent_store=True,
            virtual_local_rank=self.spec.virtual_local_rank,
        )

    def _serve_bootstrap(self, info: RendezvousInfo) -> bool:
        """The first node serves a store for ``init_process_group("env://")``: a new one for each generation.

        torchrun keeps one store for all restarts, so that the keys of dead ranks are read by living ones.
        """
        self._close_bootstrap()
        if info.rank != 0 or self._handler.use_agent_store:
            return True
        address = info.bootstrap_store_info
        host = "127.0.0.1" if info.world_size == 1 else ""
        try:
            self._bootstrap = TCPStore.serve(host, address.master_port)
        except OSError as error:
            log.warning("port %d for the workers' store is taken: %s", address.master_port, error)
            return False
        return True

    def _close_bootstrap(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    def _on_join_failed(self, error: BaseException) -> None:
        self._is_joining = False
        if isinstance(error, RendezvousClosedError) and self._journal is not None and self.info is not None:
            self._on_closed(str(error))
            return
        self.state = WorkerState.UNKNOWN
        raise error

    # -- exits ---------------------------------------------------------------------------------------------------

    def _on_exit(self, member: CrewMember) -> None:
        code = member.process.exit_code
        self._emit(
            "worker_exited", generation=member.place.generation, rank=member.place.rank, worker_id=member.id,
            local_rank=member.place.local_rank, pid=member.process.pid, exit_code=code,
        )  # fmt: skip
        if not self._is_joining and member.id in self._ids:
            self._judge_exit(member)

    def _judge_exit(self, member: CrewMember) -> None:
        assert self.info is not None and self._journal is not None, "a worker ended before any generation"
        generation = self.info.generation
        if member.is_asked_to_leave or (
            member.has_succeeded and self._heals and self._journal.is_leaving(generation, member.id)
        ):
            self._drop(member)
            verdict = _policy.on_leave(self._situation(), reason=f"worker {member.id} left")
            if verdict is not None:
                self._end_generation(verdict, (member.id,))
            else:
                self._finish_if_done()
        elif member.has_succeeded:
            self._values[member.place.rank] = self._crew.value_of(member)
            self._finish_if_done()
        else:
            self._on_failure([member])

    def _on_failure(self, members: list[CrewMember]) -> None:
        assert self.info is not None and self._journal is not None, "a worker failed before any generation"
        now = time.time()
        failures = [self._crew.failure_of(member, now) for member in members]
        first = min(failures, key=lambda failure: failure.timestamp)
        reason = f"rank {first.rank} on {first.host} failed: {first.describe_exit()}"
        verdict = _policy.on_failure(self._situation(), reason=reason, is_start_failure=first.is_start_failure)
        verdict = self._break(verdict, tuple(member.id for member in members))
        for failure in failures:
            failure.generation = self.info.generation
            self._failures[failure.worker_id] = failure
            self._journal.report(failure)
        self._obey(verdict)

    def _situation(self) -> Situation:
        assert self.info is not None, "no generation yet"
        return Situation(
            heals=self._heals,
            restarts=self.restarts,
            max_restarts=self.spec.max_restarts,
            num_nodes=self.info.world_size,
            min_nodes=self.spec.min_nodes,
            survivors=len([member for member in self._crew.running if member.id in self._ids]),
        )

    def _drop(self, member: CrewMember) -> None:
        self._ids = [worker_id for worker_id in self._ids if worker_id != member.id]
        self._size = len(self._ids)
        self._crew.forget(member.id)

    # -- the end of a generation ---------------------------------------------------------------------------------

    def _end_generation(self, verdict: Verdict, lost: tuple[str, ...] = ()) -> None:
        self._obey(self._break(verdict, lost))

    def _break(self, verdict: Verdict, lost: tuple[str, ...]) -> Verdict:
        """Propose a verdict and tell everybody that the generation is over; the standing verdict is returned."""
        assert self.info is not None and self._journal is not None, "no generation to end"
        verdict = self._journal.decide(self.info.generation, verdict)
        broken = Broken(reason=verdict.reason, workers=lost)
        self._handler.break_generation(self.info.generation, broken)
        if self._running_on >= 0:  # workers may still be on their way out of the generation before
            self._handler.break_generation(self._running_on, broken)
        return verdict

    def _on_end(self, end: GenerationEnd) -> None:
        assert self.info is not None and self._journal is not None, "no generation to end"
        if end.kind == "closed":
            self._on_closed(end.reason)
        elif end.kind == "wanted" and self._heals:
            self._want_regroup(end.reason)
        elif end.kind == "wanted":
            self._end_generation(_policy.on_membership_change(self._situation(), reason=end.reason))
        elif end.kind == "broken":
            change = _policy.on_membership_change(self._situation(), reason=end.reason)
            self._obey(self._journal.decide(self.info.generation, change))
        else:
            self._on_lost(end.reason)

    def _obey(self, verdict: Verdict) -> None:
        assert self.info is not None, "no generation to end"
        self._running_on = -1
        log.warning("generation %d is over (%s): %s", self.info.generation, verdict.action.value, verdict.reason)
        self._emit(verdict.action.value, generation=self.info.generation, reason=verdict.reason)
        self.is_in_exit_barrier = False
        if verdict.action is Action.FAIL:
            self._fail(verdict.reason)
        elif self._heals:
            self._go_on_with_survivors(verdict)
        else:
            self._stop_all()
            self._values.clear()
            self._ids = self._new_ids(self._size)
            self._join()

    def _go_on_with_survivors(self, verdict: Verdict) -> None:
        """Keep the place of every survivor; a dead worker's place goes to its replacement or is closed."""
        next_ids: list[str] = []
        for worker_id in self._ids:
            member = self._crew.members[worker_id]
            if member.is_running:
                next_ids.append(worker_id)
                continue
            if not member.has_succeeded and verdict.action is not Action.SHRINK:
                next_ids += self._new_ids(1)
                self._emit("worker_replaced", generation=member.place.generation, old=worker_id, new=next_ids[-1])
            self._crew.forget(worker_id)
        self._ids, self._size = next_ids, len(next_ids)
        if self._ids:
            self._join()
        elif self._failures:
            self._finish(RunResult(WorkerState.FAILED, failures=self._local_failures()))
        else:
            self._finish(RunResult(WorkerState.SUCCEEDED, dict(self._values)))

    def _stop_all(self) -> None:
        self._crew.stop(signal.SIGTERM, self._options.shutdown_timeout)
        self.state = WorkerState.STOPPED
        for worker_id in list(self._crew.members):
            self._crew.forget(worker_id)

    def _fail(self, reason: str) -> None:
        assert self.info is not None and self._journal is not None, "no generation to fail"
        self._stop_all()
        try:
            failures = self._journal.failures(self.info.generation)
        except StoreError:
            failures = {}
        mine = {failure.rank: failure for failure in self._failures.values() if failure.generation == self.info.generation}
        self._handler.set_closed()
        if not (failures or mine):
            failures = {self.info.node.base_rank: _unexplained(reason)}
        self._finish(RunResult(WorkerState.FAILED, failures={**failures, **mine}))

    def _local_failures(self) -> dict[int, ProcessFailure]:
        return {failure.rank: failure for failure in self._failures.values()}

    def _on_closed(self, reason: str) -> None:
        assert self.info is not None and self._journal is not None, "closed before any generation"
        verdict = self._journal.verdict(self.info.generation)
        if verdict is not None and verdict.action is Action.FAIL:
            self._obey(verdict)
        elif self.is_in_exit_barrier:
            self._finish(RunResult(WorkerState.SUCCEEDED, dict(self._values)))
        else:
            self._stop_all()
            self._finish(RunResult(WorkerState.STOPPED))

    def _on_lost(self, reason: str) -> None:
        """The store is out of reach, or this node was taken for dead: its workers are in nobody's group any more."""
        if self.is_in_exit_barrier:
            log.warning("the store went away while waiting for other nodes to finish: %s", reason)
            self._finish(RunResult(WorkerState.SUCCEEDED, dict(self._values)))
            return
        log.error("lost the rendezvous: %s; stopping this node's workers and trying to join again", reason)
        self._emit("rendezvous_lost", generation=self.info.generation if self.info else -1, reason=reason)
        self._stop_all()
        self._ids = self._new_ids(self._size)
        try:
            self._join()
        except (StoreError, RendezvousConnectionError) as error:
            raise RendezvousConnectionError(f"lost the rendezvous ({reason}) and cannot join it again: {error}") from error

    # -- finishing -----------------------------------------------------------------------------------------------

    def _finish_if_done(self) -> None:
        members = [self._crew.members[worker_id] for worker_id in self._ids]
        if any(member.is_running for member in members) or self.is_in_exit_barrier:
            return
        assert self.info is not None and self._journal is not None, "workers finished before any generation"
        self.state = WorkerState.SUCCEEDED
        self.is_in_exit_barrier = True
        self._journal.say_done(self.info.generation, self.info.rank, "done")
        if self.info.world_size == 1:
            self._on_all_done(AllDone(self.info.generation, ""))
        else:
            self._sources.wait_all_done(self.info, self._options.exit_barrier_timeout)

    def _on_all_done(self, event: AllDone) -> None:
        assert self.info is not None and self._journal is not None, "done before any generation"
        if event.error:
            log.warning("not all nodes said that they are done: %s", event.error)
        elif self.info.world_size > 1:
            try:  # the node that serves the store must be the last to go
                self._journal.say_done(self.info.generation, self.info.rank, "bye")
                self._journal.wait_done(self.info.generation, self.info.world_size, "bye", 5.0)
            except StoreError:
                pass
        try:
            self._handler.set_closed()
        except (StoreError, RendezvousConnectionError):
            pass
        self._finish(RunResult(WorkerState.SUCCEEDED, dict(self._values)))

    def _finish(self, result: RunResult) -> None:
        self._sources.leave_generation()
        self.state = result.state
        self._result = result
        self._emit("finished", state=result.state.value)

    def _on_signal(self, signum: signal.Signals) -> None:
        log.warning("got %s: stopping the workers", signum.name)
        self._emit("shutdown", signal=signum.name)
        self.state = WorkerState.STOPPED
        self._crew.stop(signum, self._options.shutdown_timeout)
        raise SignalException(f"agent {os.getpid()} got {signum.name}", sigval=signum)

    # -- requests through the store, hangs -----------------------------------------------------------------------

    def _watched_ids(self) -> list[str]:
        return [member.id for member in self._crew.running] if self._hang else []

    def _on_request(self, request: Requested) -> None:
        assert self.info is not None, "request before any generation"
        if request.stacks and not self._are_stacks_dumped:
            self._dump_stacks(request.stacks)
        if self._hang:
            self._hang.observe(request.progress, time.monotonic())
            self._check_hang()
        if self.is_in_exit_barrier or self._is_joining:
            return
        if request.wish is not None and request.wish != self._size:
            self._resize(request.wish)
        elif request.is_wanted and self._heals:
            self._want_regroup("another node asked for it")

    def _want_regroup(self, reason: str) -> None:
        """Form the next generation while the workers go on with this one until their next step boundary."""
        assert self.info is not None and self._journal is not None, "no generation to regroup"
        self._journal.want_regroup(self.info.generation, reason)
        self._journal.decide(self.info.generation, _policy.on_membership_change(self._situation(), reason=reason))
        self._emit("regroup", generation=self.info.generation, reason=reason)
        self._running_on = self.info.generation
        self._join()

    def _resize(self, size: int) -> None:
        log.warning("this node is asked to run %d workers instead of %d", size, self._size)
        if not self._heals:
            self._size = size
            reason = f"a node was resized to {size} workers"
            self._end_generation(_policy.on_membership_change(self._situation(), reason=reason))
        elif size > self._size:
            self._ids += self._new_ids(size - self._size)
            self._size = size
            self._want_regroup(f"a node was resized to {size} workers")
        else:
            for worker_id in self._ids[size:]:
                member = self._crew.members[worker_id]
                if not member.is_asked_to_leave:
                    member.is_asked_to_leave = True
                    member.process.send_signal(signal.SIGTERM, to_group=False)

    def _check_hang(self) -> None:
        assert self._hang is not None and self.info is not None and self._journal is not None, "no hang detection"
        hanging = self._hang.hanging(time.monotonic())
        if not hanging or self._is_joining:
            return
        worst = self._crew.members.get(hanging[0])
        if worst is None:
            return
        reason = f"rank {worst.place.rank} made no progress for {self._hang.timeout:g} s"
        log.error("%s; writing all stacks, then it is killed", reason)
        self._emit("hang", generation=self.info.generation, rank=worst.place.rank, worker_id=worst.id)
        self._journal.request_stacks(self.info.generation, reason)
        self._dump_stacks(reason)
        worst.note = f"no progress for {self._hang.timeout:g} s; all stacks are in the logs"
        worst.process.send_signal(signal.SIGKILL)
        self._hang.reset(time.monotonic())

    def _dump_stacks(self, reason: str) -> None:
        self._are_stacks_dumped = True
        asked = self._crew.dump_stacks()
        time.sleep(0.3)  # the dump is written by the worker's signal handler; nothing tells when it is complete
        for member in asked:
            try:
                with open(member.stacks_file) as file:
                    text = file.read()
            except OSError:
                text = ""
            log.error("stacks of rank %d (pid %d), because %s:\n%s", member.place.rank, member.process.pid, reason,
                      text or "(no answer: the process is stopped or no Python)")  # fmt: skip

    # -- for others to look at -----------------------------------------------------------------------------------

    def snapshot(self) -> WorkerGroup:
        """The workers as they are now."""
        info = self.info
        size = info.num_workers if info else -1
        workers = [
            Worker(
                local_rank=member.place.local_rank, global_rank=member.place.rank, role_rank=member.place.rank,
                world_size=size, role_world_size=size, id=member.process.pid,
            )
            for member in self._crew.members.values()
        ]  # fmt: skip
        return WorkerGroup(
            spec=self.spec, workers=workers, state=self.state,
            group_rank=info.rank if info else None, group_world_size=info.world_size if info else None,
            master_addr=info.bootstrap_store_info.master_addr if info else None,
            master_port=info.bootstrap_store_info.master_port if info else None,
        )  # fmt: skip


def _unexplained(reason: str) -> ProcessFailure:
    return ProcessFailure(local_rank=-1, pid=0, exitcode=1, message=reason, timestamp=time.time())
