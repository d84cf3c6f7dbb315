"""Regroups this worker with the others: after a loss, at a step boundary, at the beginning and at the end.

A membership comes from the coordinator; then ``bring_level`` gives everyone in the round the same state; if that fails
because another worker is lost, the next generation follows, as often as it takes. The job's state is changed by
``bring_level`` only.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from phalanx.elastic._options import Regrouped
from phalanx.elastic.checkpoint._saves import NotSaved
from phalanx.elastic.membership._coordinator import (
    Coordinator,
    EvaluationKnown,
    JobOver,
    NothingLeft,
    ToldToLeave,
)
from phalanx.elastic.membership._final_state import Encoded, FinalStateServer
from phalanx.elastic.membership._leave import LeaveRequest, leave_signals
from phalanx.elastic.membership._lost import LOST
from phalanx.elastic.membership._rounds import Membership, choose_writer
from phalanx.elastic.membership._sync import fingerprint
from phalanx.elastic.membership._training import Training
from phalanx.elastic.reduce._flat_layout import SCALARS
from phalanx.elastic.reduce._reduction import Reduction
from phalanx.errors import CommError, PeerLost
from phalanx.events._event_types import GroupLost, NotNeeded, RankTakenOver, RoundFormed, StateReceived, TrainingLeft
from phalanx.protocol import Finish, Ready


class Regrouping:
    def __init__(self, job: Training, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        leave = self.leave = LeaveRequest(leave_signals(job.run.leave_signals))
        coordinator.should_leave = lambda: leave.requested  # not by way of the job: a coordinator may outlive it
        self.is_evaluating = False
        self.is_over = False
        """Whether all workers have committed the last step."""
        self._is_apart = False
        """Whether this worker came after the last step and so has a rank but no place in a group."""
        self._place: tuple[int, int] | None = None
        """Rank and number of workers after the last step, where they do not change any more."""
        self._server: FinalStateServer | None = None
        self._job = job
        self.writer = coordinator.worker_id
        """Who writes files, logs and checkpoints: the worker that is there for the longest."""
        self._came: list[int] | None = None
        """Generation, round and rank of this worker's first place."""
        self._membership: Membership | None = None
        self._reduction: Reduction | None = None
        self._lost: CommError | None = None
        """Why the group is gone, if that was found between two steps."""

    @property
    def has_begun(self) -> bool:
        return self._membership is not None

    @property
    def membership(self) -> Membership:
        if self._membership is None:
            raise RuntimeError("the job has not begun; it joins the other workers when its first step is asked for")
        return self._membership

    @property
    def rank(self) -> int:
        return self.membership.rank if self._place is None else self._place[0]

    @property
    def world_size(self) -> int:
        return len(self.membership.workers) if self._place is None else self._place[1]

    @property
    def reduction(self) -> Reduction:
        assert self._reduction is not None, "a place in a round comes with a reduction"
        return self._reduction

    def use(self, reduction: Reduction) -> None:
        """Sum otherwise from the next step on: the same group, slots dealt otherwise."""
        self._reduction = reduction

    @property
    def is_broken(self) -> bool:
        return self.coordinator.signals.broken is not None or self._lost is not None

    def note_loss(self, error: CommError) -> None:
        """Keep for the next step that the group is gone: what fails in it then fails alike on all workers."""
        self._lost = error

    def check(self) -> None:
        """Raise if the generation is known to be over, or if this worker has no place in one."""
        if self._is_apart:
            raise PeerLost(
                f"worker {self.coordinator.worker_id} came after the last step",
                generation=self.membership.generation,
            )
        if self.coordinator.signals.broken is not None:
            raise self.coordinator.signals.broken
        if self._lost is not None:
            raise self._lost

    def wishes(self, *, is_again: bool) -> Tensor:
        """Return this worker's part of the numbers that ride along, in their places."""
        values = self.own_wishes(is_again=is_again)
        return torch.tensor([values.get(name, 0.0) for name in SCALARS], device=self._job.pool.layout.device)

    def own_wishes(self, *, is_again: bool) -> dict[str, float]:
        """Return whether this worker wants to regroup, leaves, computes again."""
        leaves = self.leave.is_counted = self.leave.requested  # once: a signal may come between two looks
        if leaves and self.leave.announced_in != self.membership.generation:
            self.coordinator.announce_leaving(self.membership)
            self.leave.announced_in = self.membership.generation
        return {
            "wish": float(self.coordinator.signals.wish or leaves),
            "leaving": float(leaves),
            "again": float(is_again),
        }

    # -- who writes -------------------------------------------------------------------------------------------

    def came_at(self, membership: Membership) -> list[int]:
        """Return when this worker came: with this place, if it has had none before."""
        return self._came or [membership.generation, membership.round, membership.rank]

    def choose_writer(self, membership: Membership, came: Sequence[Sequence[int]]) -> None:
        """Note who writes in this round. For ``bring_level`` only."""
        self._came = self.came_at(membership)
        self.writer = choose_writer(membership.workers, came)

    # -- when it changes --------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._settle(lambda: self.coordinator.join(self._ready()))

    def recover(self, cause: CommError) -> None:
        """Take a place in a later generation: the group is gone."""
        if self._is_apart:
            self._settle(lambda: self.coordinator.rejoin(self.membership.generation, self._ready()))
            return
        dropped, waited = self._job.clock.drop()
        self._job.events.write(
            GroupLost(
                generation=self.membership.generation,
                step=self._job.step,
                reason=str(cause),
                dropped=dropped,
                waited=waited,
            )
        )
        while True:
            try:
                self._settle(lambda: self.coordinator.join_after_loss(self.membership, self._ready(), cause))
                return
            except EvaluationKnown as known:
                if self.is_evaluating:
                    raise
                self._job.count_evaluation(known.result)  # it was on its way to that evaluation

    def cross_boundary(self, *, wish: bool, num_leaving: int) -> None:
        """Between two steps: leave or regroup if the reduction said that someone wants it."""
        if not wish:
            return
        num_workers = len(self.membership.workers)
        # Of an unsharded job only those who carry slots take part in the reduction that counts them.
        num_heard = num_workers if self._job.is_sharded else min(num_workers, self._job.num_slots)
        all_leave = num_leaving >= num_heard
        everyone = bool(num_leaving) and (all_leave or not self.coordinator.can_change)
        if everyone and self._job.saving.options is not None:
            self._save_for_all()
        if num_leaving and not everyone and not self._job.hand_over():
            return  # the group is lost: the next step finds out, and who wants to leave says so again
        # Who was asked to leave after its part of the reduction had gone out does not leave here: the others count on
        # it, and were they all to leave like that, nobody would save.
        if everyone or self.leave.is_counted:
            self._job.events.write(TrainingLeft(step=self._job.step, generation=self.membership.generation))
            self.coordinator.step_aside(self.membership)
            raise SystemExit(0)
        self._settle(lambda: self.coordinator.join_at_boundary(self.membership, self._ready()))

    def _save_for_all(self) -> None:
        """All leave: the first worker saves, and all hear whether it could. ``NotSaved`` on all of them if not."""
        group, problem = self.membership.group, ""
        if self.membership.rank == 0 or self._job.is_sharded:
            problem = self._save_or_tell()
        if group is not None:
            self.coordinator.waiting(True)
            try:
                problem = group.broadcast_value(problem, 0)
            except LOST as error:  # whoever died has been noticed: there is nothing left to agree on
                if self.membership.rank == 0 and problem:
                    raise NotSaved(problem) from error
        if problem:
            raise NotSaved(problem)

    def _save_or_tell(self) -> str:
        """Save now; why it was not possible."""
        try:
            self._job.save()
        except OSError as error:
            options = self._job.saving.options
            assert options is not None, "the caller has asked"
            return (
                f"all workers were told to leave, and the state at step {self._job.step} could not be saved to "
                f"{options.directory}: {error}. What was done since the last save is lost; mend the disk and run again"
            )
        return ""

    def part(self) -> None:
        """Nobody may end before all have committed the last step: one that is behind needs the others."""
        if self.is_over and self.coordinator.can_change:
            return  # it came after the last step
        self.is_over = False  # a fixed group may loop again
        while not self.is_over:
            try:
                self.check()
                self.coordinator.waiting(True)
                if self.membership.group is not None:
                    self.membership.group.barrier()
                self._job.finish_together()
                self._end(self.coordinator.declare_done(self.membership, self._job.step))
            except LOST as error:
                finish = self.coordinator.finish_after(self.membership, error, self._job.step)
                if finish is not None:
                    self._end(finish)  # the others got through: all had committed
                else:
                    self.recover(error)  # which may find the same a moment later

    def _end(self, finish: Finish) -> None:
        self._begin_epilogue(finish, (self.membership.rank, len(self.membership.workers)), self.membership.generation)

    def stay(self, limit: float) -> None:
        """Called when the script has ended well: wait for those of the others, which may need the final state."""
        if self._server is not None:
            self._server.stay(limit)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.coordinator.close()
        if self._membership is not None and self._membership.group is not None and self._job.run.group is None:
            self._membership.group.close()

    # -- how it changes ---------------------------------------------------------------------------------------

    def _ready(self) -> Ready:
        if self._job.is_fresh:
            return Ready()
        return Ready(
            step=self._job.step,
            evaluations=self._job.num_evaluations,
            evaluating=self.is_evaluating or self._job.is_before_evaluation,
            peers=self.membership.workers,
        )

    def _settle(self, join: Callable[[], Membership]) -> None:
        """Sit down and agree on the state with everyone in the round, or move on if that fails too."""
        before, began, wrote = self._membership, time.monotonic(), self.writer
        while True:
            try:
                membership = join()
            except JobOver as over:
                if self._take_over(over):
                    return
                join = partial(self.coordinator.rejoin, over.generation + 1, self._ready())
                continue
            except ToldToLeave:
                self._leave_without_place()
            self._membership, self._is_apart, self._lost = membership, False, None
            try:
                self._reduction = self._job.form(membership)
                self.coordinator.waiting(True)
                joined = time.monotonic()
                self._job.bring_level(self.coordinator, membership)
                self.coordinator.waiting(False)
                break
            except LOST as error:
                join = partial(self.coordinator.join_after_loss, membership, self._ready(), error)
        self._job.is_fresh = False
        now = time.monotonic()
        self._tell(before, membership, now - began, now - joined)
        on_writer = self._job.callbacks.on_writer
        if before is not None and on_writer is not None and self.writer != wrote:
            on_writer(self.writer)

    def _take_over(self, over: JobOver) -> bool:
        """Return all steps are done: go on after them, as one of those who did them or in the place of one that is lost
        since.

        False when the generation is over before that is done.
        """
        job = self._job
        if not job.is_fresh and self.coordinator.worker_id in over.finish.workers:
            self._end(over.finish)
            return True
        try:
            taken = self.coordinator.take_over(over)
        except NothingLeft as error:
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
            job.events.write(NotNeeded(step=over.finish.step))
            raise SystemExit(0) from None
        if taken is None:
            return False
        job.take_state(taken.state)
        is_writers_place = over.finish.workers[taken.rank] == taken.state.get("writer")
        self.writer = self.coordinator.worker_id if is_writers_place else taken.state.get("writer", "")
        job.events.write(StateReceived(step=job.step, source=taken.source))
        job.events.write(RankTakenOver(step=job.step, rank=taken.rank, generation=taken.generation))
        self._membership = Membership(taken.generation, 0, taken.workers, taken.rank, None)
        self._is_apart = True
        self._begin_epilogue(over.finish, (taken.rank, len(taken.workers)), taken.generation)
        return True

    def _begin_epilogue(self, finish: Finish, place: tuple[int, int], generation: int) -> None:
        """From here on the script runs what follows its steps, and its model is its own."""
        self.is_over = True
        self._place = place
        state: Encoded | None = None
        if self.coordinator.can_change and place[1] > 1 and self._job.run.hold > 0:
            try:
                state = self._job.copy_state()
            except (MemoryError, RuntimeError) as error:
                warnings.warn(
                    f"worker {self.coordinator.worker_id} has no memory for a copy of the final state ({error}): if "
                    "others die after the last step, they cannot take it from this one",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._server = self.coordinator.keep(finish, place[0], generation, state)

    def _leave_without_place(self) -> NoReturn:
        """Leave without a place: maybe all were told to, so whoever has a state saves it."""
        alone = not self._job.is_sharded  # else it has a part of the state only
        if not self._job.is_fresh and self._job.saving.options is not None and alone:
            problem = self._save_or_tell()
            if problem:
                raise NotSaved(problem)
        self._job.events.write(TrainingLeft(step=self._job.step))
        raise SystemExit(0)

    def _tell(self, before: Membership | None, membership: Membership, seconds: float, state_seconds: float) -> None:
        old = before.workers if before is not None else ()
        news = Regrouped(
            generation=membership.generation,
            round=membership.round,
            workers=membership.workers,
            joined=tuple(w for w in membership.workers if w not in old),
            left=tuple(w for w in old if w not in membership.workers),
            step=self._job.step,
            seconds=seconds,
        )
        self._job.clock.flush()
        self._job.events.write(
            RoundFormed(
                **vars(news),
                rank=membership.rank,
                machine=fingerprint(self._job.model),
                state_seconds=state_seconds,
                first_slot=_first_slot(self.reduction.slots),
                num_slots=len(self.reduction.slots),
                is_verified=self._job.run.verify or None,
            )
        )
        callbacks = self._job.callbacks
        if before is None:
            return
        if callbacks.on_regroup is not None:
            callbacks.on_regroup(news)
        for callback, workers in ((callbacks.on_newcomer, news.joined), (callbacks.on_leave, news.left)):
            if callback is not None:
                for worker in workers:
                    callback(worker)


def _first_slot(slots: Sequence[int]) -> int | None:
    """Return the first of neighbours; nothing of slots that are apart, as those of a sharded job are.

    >>> _first_slot([3, 4, 5]), _first_slot([0, 4]), _first_slot([])
    (3, None, 0)
    """
    if not slots:
        return 0
    return slots[0] if slots[-1] - slots[0] == len(slots) - 1 else None
