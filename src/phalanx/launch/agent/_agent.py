"""Runs a node in one loop that takes events one by one, asks the policy, and acts.

Guarantees: only this loop (the caller's thread) starts, stops and judges workers, so nothing here needs a lock; an
exit is acted upon when it happens, not at a polling interval; every generation ends by one recovery that all agents
share (``_agent_channel``); whatever way ``run`` is left, no worker remains.
Assumptions: ``_sources`` threads only post events; the rendezvous agrees on nodes, this class never does.
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
from dataclasses import replace

from phalanx.errors import StoreLost
from phalanx.launch.agent import _sources as happened
from phalanx.launch.agent._departure import Departure
from phalanx.launch.agent._generation import Generation, PortTaken
from phalanx.launch.agent._observer import Observer
from phalanx.launch.agent._run_results import Results
from phalanx.launch.agent._sources import Event, Sources
from phalanx.launch.agent._worker_ids import WorkerIds
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._worker_spec import RunResult, WorkerState
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.hang._hang_watch import HangWatch, stacks_of
from phalanx.launch.recovery import _policy
from phalanx.launch.recovery._budget import NOBODY
from phalanx.launch.recovery._policy import Situation
from phalanx.launch.rendezvous._interface import (
    GenerationEnd,
    GenerationHandler,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
)
from phalanx.launch.system._signals import SignalException
from phalanx.launch.workers._pool import WorkerPool
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.preemption import Notice
from phalanx.protocol import Action, Broken, Recovery

log = logging.getLogger(__name__)

FOR_OTHERS = 3600.0  # seconds until a node that serves others looks again whether it has to


class Agent:
    """Runs the workers of a node to their end. ``observer`` hears of every change."""

    def __init__(
        self,
        config: LaunchConfig,
        handler: GenerationHandler,
        pool: WorkerPool,
        sources: Sources,
        observer: Observer,
    ) -> None:
        self.config = config
        self.state = WorkerState.INIT
        self.is_in_exit_barrier = False
        self.alive_at = time.time()
        self.current: Generation | None = None
        self.departure = Departure()
        self._handler = handler
        self._pool = pool
        self._sources = sources
        self._observer = observer
        self._heals = config.on_failure == "heal"
        self._is_joining = False
        self._size = config.nproc_per_node  # with which this node starts when all start anew
        self._worker_ids = WorkerIds(f"{socket.gethostname()}.{secrets.token_hex(3)}", config.nproc_per_node)
        self._running_on = -1  # the generation before, when its workers were to leave it at a step boundary
        self._results = Results()
        self._wish = -1
        self._has_told_anew = False  # that all workers start anew because they cannot regroup
        self._hang = HangWatch(config, pool)
        self._result: RunResult | None = None

    def run(self) -> RunResult:
        """Take part in the job until it is over. Leaves no worker behind, however it is left."""
        try:
            self._join()
            while self._result is None:
                self.alive_at = time.time()
                event = self._sources.next(self.config.monitor_interval)
                if event is not None:
                    self._take(event)
                elif not self._is_joining:
                    self._pool.refill()
            return self._result
        except StoreLost as error:  # this node read or wrote a record before the rendezvous noticed
            run_id = self._handler.get_run_id()
            raise RendezvousConnectionError.lost("this node", run_id, error) from error
        finally:
            self._sources.leave_generation()
            self._pool.stop()
            if self.current:
                self.current.close()

    @property
    def _generation(self) -> Generation:
        assert self.current is not None, "nothing happens to workers before the first generation"
        return self.current

    def _take(self, event: Event) -> None:
        if isinstance(event, happened.Exited):
            self._on_exit(event.worker)
        elif isinstance(event, happened.Formed | happened.JoinFailed) and self.departure.has_withdrawn:
            return  # what it waited for is not for this node any more
        elif isinstance(event, happened.Formed):
            self._on_formed(event.info)
        elif isinstance(event, happened.JoinFailed):
            self._on_join_failed(event.error)
        elif isinstance(event, happened.Signalled):
            self._on_signal(event.signum)
        elif isinstance(event, happened.Noticed):
            self._on_notice(event.notice)
        elif self._is_joining or self.current is None or event.generation != self.current.number:
            return  # about a generation that this node has left already
        elif isinstance(event, happened.Ended):
            self._on_end(event.end)
        elif isinstance(event, happened.Requested):
            self._on_request(event)
        elif isinstance(event, happened.Parted):
            self._on_parted(event)
        elif isinstance(event, happened.AllDone):
            self._on_all_done(event)

    # -- forming a generation ------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Ask for the next generation with the workers of this node; fork those that are new meanwhile."""
        self._is_joining = True
        self._observer.joining()
        self._handler.set_local_size(self._worker_ids.size, tuple(self._worker_ids.ids), self.config.role)
        self._sources.join()
        self._pool.prepare(sum(worker_id not in self._pool.workers for worker_id in self._worker_ids.ids))

    def _on_formed(self, info: RendezvousInfo) -> None:
        self._is_joining = False
        if self.current:
            self.current.close()
        self.current = generation = Generation(self.config, info, self._handler, self._sources.lasting)
        try:
            generation.serve_bootstrap()
        except PortTaken as taken:
            self._on_port_taken(str(taken))
            return
        assignments = generation.assignments()
        self._observer.generation_formed(info, self._size * self.config.max_nodes)
        new = [assignment for assignment in assignments if assignment.worker_id not in self._pool.workers]
        for worker in self._pool.start(new, generation.job_facts()):
            self._observer.worker_started(worker)
        for assignment in assignments:
            self._pool.workers[assignment.worker_id].assignment = assignment
        self.state = WorkerState.HEALTHY
        self._hang.begin_generation(time.monotonic())
        self._sources.follow(info, self.config.request_interval, self._hang.watched_ids)
        self._ask_to_leave_if_noticed()
        self._judge_early_exits()

    def _on_port_taken(self, reason: str) -> None:
        """Without a store of their own no worker could start: another port, or the end."""
        chosen = self._handler.has_fixed_port
        recovery = self._generation.propose(_policy.on_port_taken(self._situation(), reason=reason, is_chosen=chosen))
        self._generation.break_up(recovery, also=self._running_on)
        if recovery.action is Action.FAIL:
            self._handler.close_as("failed", recovery.reason)
            raise RendezvousStateError(recovery.reason)
        self._apply(recovery)

    def _judge_early_exits(self) -> None:
        """Deal with those who died while the generation was being agreed upon."""
        for worker_id in list(self._worker_ids.ids):
            worker = self._pool.workers.get(worker_id)
            if self._is_joining or self._result is not None:
                return  # the generation is over already, and with it everybody's exit is dealt with
            if worker is not None and not worker.is_running and not worker.is_judged:
                self._judge_exit(worker)

    def _on_join_failed(self, error: BaseException) -> None:
        self._is_joining = False
        if isinstance(error, RendezvousClosedError) and self.current is not None:
            if error.outcome == "succeeded":  # a later generation has done it, without this node
                log.warning("%s; this node was not needed for it any more", error)
                self._stop_all()
                self._finish(RunResult(WorkerState.STOPPED))
            else:
                self._on_closed(str(error))
            return
        self.state = WorkerState.UNKNOWN
        if isinstance(error, RendezvousClosedError) and error.outcome != "failed":
            raise RendezvousGracefulExitError(f"{error}; this node came too late to take part") from error
        raise error

    def _on_exit(self, worker: WorkerHandle) -> None:
        self._observer.worker_exited(worker)
        if self._is_joining:
            self._leave_if_deserted()
        elif not worker.is_judged and worker.id in self._worker_ids.ids:
            self._judge_exit(worker)

    def _judge_exit(self, worker: WorkerHandle) -> None:
        worker.is_judged = True
        if self._heals and not worker.has_succeeded and self._generation.channel.has_ended(worker.id):
            log.warning("worker %s was lost after its script had ended; nothing is missing", worker.id)
            worker.has_done_its_part = True
        if self._generation.has_left(worker):
            self._worker_ids.drop(worker.id)
            self._pool.forget(worker.id)
            self.departure.note(worker)
            if self._generation.others_follow(self._pool.running):
                return  # they leave at the same boundary: one regroup for all
            reason = f"worker {worker.id} left"
            recovery = _policy.on_leave(self._situation(), reason=reason, is_noticed=self.departure.is_on)
            if recovery is not None:
                self._end_generation(recovery, (worker.id,))
            else:
                self._finish_if_done()
        elif self._take_success(worker):
            self._finish_if_done()
        else:
            self._on_failure()

    def _take_success(self, worker: WorkerHandle) -> bool:
        """Note that a worker has ended well, with its value; False when it has not."""
        if not (worker.has_succeeded and self._pool.fetch_value(worker)):
            return False
        self._results.values[worker.assignment.rank] = worker.value
        if self._heals:  # others may wait for the end of its script, of which it need not have told
            self._generation.channel.say_ended(worker.id)
        return True

    def _on_failure(self) -> None:
        """At least one worker of this node has failed; all that have by now are dealt with together."""
        failures = self._pool.failures_among(self._worker_ids.ids)
        first = min(failures, key=lambda failure: failure.precedence)
        reason = f"rank {first.rank} on {first.host} failed: {first.describe_exit()}"
        now = self._situation()
        streak = self._generation.streak_after(self._pool.workers[first.worker_id], first, anew=not now.keeps_survivors)
        recovery = _policy.on_failure(
            replace(now, node=NOBODY) if first.is_complaint else now,
            reason=reason,
            is_incurable=first.is_incurable,
            ends_job=any(failure.ends_job for failure in failures),
            has_wrong_bits=any(failure.has_wrong_bits for failure in failures),
            streak=streak,
        )
        recovery = self._generation.propose(recovery)
        for failure in failures:  # before others hear that it is over: they may want to report it
            self._results.add_failure(failure, self._generation)
            self._observer.worker_failed(failure)
        self._end_as(recovery, tuple(failure.worker_id for failure in failures))

    def _situation(self) -> Situation:
        survivors = len([worker for worker in self._pool.running if worker.id in self._worker_ids.ids])
        return self._generation.situation(survivors)

    # -- the end of a generation ---------------------------------------------------------------------------------

    def _end_generation(self, proposal: Recovery, lost: tuple[str, ...] = ()) -> None:
        self._end_as(self._generation.propose(proposal), lost)

    def _end_as(self, recovery: Recovery, lost: tuple[str, ...] = ()) -> None:
        """Tell everybody that the generation is over, and do what all agents have agreed on."""
        self._generation.break_up(recovery, lost, self._running_on)
        self._apply(recovery)

    def _on_end(self, end: GenerationEnd) -> None:
        if end.kind == "closed":
            self._on_closed(end.reason)
        elif end.kind == "wanted":
            self._want_regroup(end.reason)
        elif end.kind == "broken":
            self._apply(self._generation.agreed(lambda: _policy.on_membership_change(self._situation(), end.reason)))
        else:
            self._on_lost(end.reason)

    def _apply(self, recovery: Recovery) -> None:
        self._running_on = -1
        log.warning("generation %d is over (%s): %s", self._generation.number, recovery.action.value, recovery.reason)
        self._observer.generation_ended(self._generation.number, recovery, self.config.max_restarts)
        self.is_in_exit_barrier = False
        if recovery.action is Action.FAIL:
            self._fail(recovery.reason)
        elif self._generation.info.node.id in recovery.leave_out:
            self._sit_out(recovery.reason)
        elif not recovery.starts_anew:
            self._go_on_with_survivors(recovery)
        else:
            if self._heals and not self._has_told_anew:
                self._has_told_anew = True
                log.warning(_policy.STARTS_ANEW)
            workers = list(self._pool.workers.values())
            self._stop_all()
            self._results.values.clear()
            self._worker_ids.renew(self.departure.size_anew(self._size, workers))
            self._join_or_leave()

    def _sit_out(self, reason: str) -> None:
        """Wait as a spare that is taken only if there are too few others: something is wrong here."""
        log.error("this node is left out: %s. It stays as a spare; look at this machine", reason)
        self._worker_ids.renew(self._size)
        self._handler.become_last_choice()
        self._join()  # first, so that nobody waits for the workers that are stopped now
        self._stop_all()

    def _on_parted(self, event: happened.Parted) -> None:
        """Deal with workers that lost contact while nobody died: who is to blame is replaced, the others regroup."""
        if not self._heals:
            return  # they cannot regroup: what they raise ends them, and that is dealt with
        judgement = self._generation.judge_lost_contact(event.words, self._pool.stopped_ids())
        here = any(worker_id in self._worker_ids.ids for worker_id in judgement.replace)
        recovery = _policy.on_lost_contact(self._situation(), judgement, here)
        self._end_generation(recovery, recovery.replace)

    def _go_on_with_survivors(self, recovery: Recovery) -> None:
        for failure in self._pool.kill_all(recovery.replace, recovery.reason):
            self._results.add_failure(failure, self._generation)
        replace = recovery.action is not Action.SHRINK
        for worker_id, successor in self._worker_ids.close_ranks(self._pool.workers, replace=replace).items():
            worker = self._pool.workers[worker_id]
            if successor:
                self._observer.worker_failed(self._pool.failure_of(worker))
                self._observer.worker_replaced(worker, successor)
            elif not worker.is_judged:  # it ended well in the same moment
                self._take_success(worker)
            self._pool.forget(worker_id)
        self._join_or_leave()

    def _join_or_leave(self) -> None:
        go_on = self._join if self._worker_ids.ids else self._leave_job
        go_on()

    def _on_notice(self, notice: Notice) -> None:
        """This machine will be taken away: its workers leave at their next step boundary, and then this node does."""
        if self.departure.begin(notice):
            self._observer.noticed(self.current.number if self.current else -1, notice)
            if self.current is None:
                raise RendezvousGracefulExitError(f"notice was given before this node took part ({notice.reason})")
            self._ask_to_leave_if_noticed()
            if self._is_joining:
                self._leave_if_deserted()

    def _ask_to_leave_if_noticed(self) -> None:
        if self.departure.is_due(is_finishing=self._generation.channel.is_finishing):
            self._pool.ask_to_leave(self._worker_ids.ids)

    def _leave_if_deserted(self) -> None:
        """Give up the place that this node waits for: its workers, who were asked to leave, have gone without one."""
        known = [self._pool.workers.get(worker_id) for worker_id in self._worker_ids.ids]
        if self.current is not None and self.departure.is_deserted(known):
            self._worker_ids.ids.clear()
            self._is_joining = False
            self._leave_job()

    def _leave_job(self) -> None:
        """No worker is left here: the others need not wait for this node, but maybe need the store that it serves."""
        self._handler.withdraw()
        if self._handler.is_host and self._generation.info.world_size > 1:
            log.warning("this node serves the job's store, and stays without workers until the others are done")
            self.is_in_exit_barrier = True
            self._sources.wait_for_others(self._generation.info)
        else:
            self._finish(self._results.node_is_empty())

    def _stop_all(self) -> list[ProcessFailure]:
        """Stop and forget all workers; the failures of those that had failed before, which nobody has dealt with."""
        unheard = self._pool.end_all()
        for failure in unheard:
            self._observer.worker_failed(failure)
        self.state = WorkerState.STOPPED
        return unheard

    def _fail(self, reason: str) -> None:
        result = self._results.failed(self._generation, reason, self._stop_all())
        self._handler.close_as("failed", reason)
        self._finish(result)

    def _on_closed(self, reason: str) -> None:
        recovery = self._generation.channel.recovery(self._generation.number)
        if recovery is not None and recovery.action is Action.FAIL:
            self._apply(recovery)
        elif self.is_in_exit_barrier:
            self._finish(self._results.succeeded())
        else:
            log.error("the rendezvous was closed while workers ran (%s); they are stopped", reason)
            self._stop_all()
            self._finish(self._results.closed(self._generation, reason))

    def _on_lost(self, reason: str) -> None:
        """Join again: the store is out of reach, or this node was taken for dead, and its workers are in no group."""
        if self.is_in_exit_barrier:
            log.warning("the store went away while waiting for other nodes to finish: %s", reason)
            self._finish(self._results.succeeded())
            return
        log.error("lost the rendezvous: %s; stopping this node's workers and trying to join again", reason)
        self._stop_all()
        self._worker_ids.renew(self._size)
        self._join()

    # -- finishing -----------------------------------------------------------------------------------------------

    def _finish_if_done(self) -> None:
        if self.is_in_exit_barrier or not all(self._pool.workers[i].is_judged for i in self._worker_ids.ids):
            return  # also when all have ended but the news of one, and with it its value, is still to come
        self.state = WorkerState.SUCCEEDED
        self.is_in_exit_barrier = True
        self._generation.say_done("done")
        if self._generation.info.world_size == 1:
            self._on_all_done(happened.AllDone(self._generation.number, ""))
        else:
            self._sources.wait_all_done(self._generation.info, self.config.exit_barrier_timeout)

    def _on_all_done(self, event: happened.AllDone) -> None:
        if event.is_late and self._generation.is_serving:
            log.warning("this node serves a store that others need, and stays until they are done")
            self._sources.wait_all_done(self._generation.info, FOR_OTHERS)
            return
        if event.error:
            log.warning("not all nodes said that they are done: %s", event.error)
            self._generation.leave_early()
        else:
            try:
                self._handler.close_as("succeeded", "all workers have succeeded")
            except RendezvousConnectionError:
                pass  # the node that served the store has read that all are done, and gone
        self._finish(self._results.succeeded())

    def _finish(self, result: RunResult) -> None:
        self._sources.leave_generation()
        result.num_setbacks = self._results.count_setbacks(self._generation, self._observer)
        self.state = result.state
        self._result = result
        self._observer.shut_down(result.state.value, succeeded=result.state is WorkerState.SUCCEEDED)

    def _on_signal(self, signum: signal.Signals) -> None:
        log.warning("got %s: stopping the workers", signum.name)
        self._observer.shut_down(f"got {signum.name}", succeeded=False)
        self.state = WorkerState.STOPPED
        self._pool.stop(signum)
        raise SignalException(f"agent {os.getpid()} got {signum.name}", sigval=signum)

    # -- requests through the store, hangs -----------------------------------------------------------------------

    def _on_request(self, request: happened.Requested) -> None:
        if request.stop:
            self._observer.asked("stop", request.stop)
            self._sources.post(happened.Signalled(signal.SIGTERM))
        if request.stacks:
            self._hang.answer(self._generation.info, request.stacks)
        self._results.note_setbacks(request.setbacks, self._generation.number, self._observer)
        if killed := self._hang.kill_who_hangs(request.progress, self._generation.info, time.monotonic()):
            self._observer.worker_hung(killed, self.config.hang_timeout, stacks_of(killed))
        if held := self._hang.held(time.monotonic()):
            self._end_generation(_policy.on_failure(self._situation(), reason=held, is_incurable=True))
        elif self.is_in_exit_barrier:
            return
        elif request.wish is not None and request.wish != self._wish:
            self._wish = request.wish
            if request.wish != self._worker_ids.size:
                self._resize(request.wish)

    def _want_regroup(self, reason: str) -> None:
        """Form the next generation; workers that can go on with this one until their next step boundary."""
        change = self._generation.propose(_policy.on_membership_change(self._situation(), reason))
        if change.starts_anew or change.action is Action.FAIL:
            self._end_as(change)
            return
        self._handler.want_generation(self._generation.number, Broken(reason=reason))
        self._observer.generation_ended(self._generation.number, change, self.config.max_restarts)
        self._running_on = self._generation.number
        self._join()

    def _resize(self, size: int) -> None:
        if self._generation.channel.is_finishing():
            log.warning("all steps are done: this node keeps its %d workers", self._worker_ids.size)
            return
        log.warning("this node is asked to run %d workers instead of %d", size, self._worker_ids.size)
        if not size and (problem := self._generation.why_not_drained(self._situation())):
            self._observer.asked("drain refused", problem)
            return
        self._size = size or self._size
        if not self._situation().keeps_survivors:
            change = f"a node was resized to {size} workers"
            self._end_generation(_policy.on_membership_change(self._situation(), change))
        elif size > self._worker_ids.size:
            self._worker_ids.grow(size)
            self._want_regroup(f"a node was resized to {size} workers")
        else:
            self._pool.ask_to_leave(self._worker_ids.ids[size:])
