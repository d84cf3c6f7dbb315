"""This worker among the others: its seat, its part of the reduction, and how both change while the job goes on.

Owns regrouping: after a loss, at a step boundary, at the beginning and at the end. A seat comes from the roster; then
``bring_level`` gives everyone in the round the same state; if that fails because another worker is lost, the next
generation follows, as often as it takes. The job's state is changed by ``bring_level`` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from phalanx.elastic._exchange import Exchange
from phalanx.elastic._layout import SCALARS
from phalanx.elastic._leave import LeaveRequest
from phalanx.elastic._options import Regrouped
from phalanx.elastic._roster import JobOver, Roster, ToldToLeave
from phalanx.elastic._saves import NotSaved
from phalanx.elastic._seats import Ready, Seat
from phalanx.elastic._sync import bring_level, fingerprint
from phalanx.errors import CommError, GroupAborted, PeerLost, PeerTimeout

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step

LOST = (PeerLost, PeerTimeout, GroupAborted)
"""Errors after which the group is gone but the job goes on in the next generation."""


class Team:
    def __init__(self, job: Job, roster: Roster) -> None:
        self.roster = roster
        self.leave = LeaveRequest()
        roster.should_leave = lambda: self.leave.requested
        self.is_evaluating = False
        self.is_over = False
        """Whether all workers have committed the last step."""
        self._job = job
        self._seat: Seat | None = None
        self._exchange: Exchange | None = None

    @property
    def has_begun(self) -> bool:
        return self._seat is not None

    @property
    def seat(self) -> Seat:
        if self._seat is None:
            raise RuntimeError(
                "the job has not begun; it joins the other workers when its first step is asked for"
            )
        return self._seat

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None, "a seat comes with an exchange"
        return self._exchange

    @property
    def is_broken(self) -> bool:
        return self.roster.signals.broken is not None

    def check(self) -> None:
        """Raise if the generation is known to be over."""
        if self.roster.signals.broken is not None:
            raise self.roster.signals.broken

    def wishes(self) -> Tensor:
        """This worker's part of the numbers that ride along: whether it wants to regroup, whether it leaves."""
        leaves = self.leave.is_counted = self.leave.requested  # once: a signal may come between two looks
        if leaves and self.leave.announced_in != self.seat.generation:
            self.roster.announce_leaving(self.seat)
            self.leave.announced_in = self.seat.generation
        values = {"wish": float(self.roster.signals.wish or leaves), "leaving": float(leaves)}
        return torch.tensor([values.get(name, 0.0) for name in SCALARS], device=self._job.pool.layout.device)

    # -- when it changes --------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._settle(lambda: self.roster.first_seat(self._ready()))

    def recover(self, cause: CommError) -> None:
        """The group is gone: take a seat in a later generation."""
        self._job.events.emit("lost", generation=self.seat.generation, step=self._job.step, reason=str(cause))
        self._settle(lambda: self.roster.seat_after_loss(self.seat, self._ready(), cause))

    def cross_boundary(self, step: Step) -> None:
        """Between two steps: leave or regroup if the reduction said that someone wants it."""
        if not step.wish:
            return
        all_leave = step.num_leaving >= min(len(self.seat.workers), self._job.num_slots)
        everyone = bool(step.num_leaving) and (all_leave or not self.roster.can_change)
        if everyone and self._job.saving.options is not None:
            self._save_for_all()
        # Who was asked to leave after its part of the reduction had gone out does not leave here: the others count on
        # it, and were they all to leave like that, nobody would save.
        if everyone or self.leave.is_counted:
            self._job.events.emit("left", step=self._job.step, generation=self.seat.generation)
            self.roster.step_aside(self.seat)
            raise SystemExit(0)
        self._settle(lambda: self.roster.seat_at_boundary(self.seat, self._ready()))

    def _save_for_all(self) -> None:
        """All leave: the first worker saves, and all hear whether it could. ``NotSaved`` on all of them if not."""
        group, problem = self.seat.group, ""
        if self.seat.rank == 0:
            problem = self._save_or_tell()
        if group is not None:
            self.roster.waiting(True)
            try:
                problem = group.broadcast_value(problem, 0)
            except LOST as error:  # whoever died has been noticed: there is nothing left to agree on
                if self.seat.rank == 0 and problem:
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
        while True:
            try:
                self.check()
                self.roster.waiting(True)
                if self.seat.group is not None:
                    self.seat.group.barrier()
                self.roster.declare_done()
                break
            except LOST as error:
                if self.roster.is_over_after(self.seat, error):
                    break  # the others got through: all had committed
                self.recover(error)
        self.is_over = True

    def close(self) -> None:
        self.roster.close()
        if self._seat is not None and self._seat.group is not None and self._job.run.group is None:
            self._seat.group.close()

    # -- how it changes ---------------------------------------------------------------------------------------

    def _ready(self) -> Ready:
        if self._job.is_fresh:
            return Ready()
        return Ready(
            step=self._job.step,
            evaluations=self._job.num_evaluations,
            evaluating=self.is_evaluating,
            peers=self.seat.workers,
        )

    def _settle(self, take_seat: Callable[[], Seat]) -> None:
        """Sit down and agree on the state with everyone in the round, or move on if that fails too."""
        before, began = self._seat, time.monotonic()
        while True:
            try:
                seat = take_seat()
            except JobOver:
                raise SystemExit(0) from None  # without the state, what follows the loop makes no sense here
            except ToldToLeave:
                self._leave_from_the_door()
            self._seat = seat
            try:
                self._exchange = Exchange(seat.group, self._job.num_slots, self._job.pool)
                self.roster.waiting(True)
                bring_level(self._job, seat)
                self.roster.waiting(False)
                break
            except LOST as error:
                take_seat = partial(self.roster.seat_after_loss, seat, self._ready(), error)
        self._job.is_fresh = False
        self._tell(before, seat, time.monotonic() - began)

    def _leave_from_the_door(self) -> NoReturn:
        """Leave without a seat: maybe all were told to, so whoever has a state saves it."""
        if not self._job.is_fresh and self._job.saving.options is not None:
            problem = self._save_or_tell()
            if problem:
                raise NotSaved(problem)
        self._job.events.emit("left", step=self._job.step)
        raise SystemExit(0)

    def _tell(self, before: Seat | None, seat: Seat, seconds: float) -> None:
        old = before.workers if before is not None else ()
        news = Regrouped(
            generation=seat.generation,
            round=seat.round,
            workers=seat.workers,
            joined=tuple(w for w in seat.workers if w not in old),
            left=tuple(w for w in old if w not in seat.workers),
            step=self._job.step,
            seconds=seconds,
        )
        self._job.events.emit("regrouped", **vars(news), rank=seat.rank, machine=fingerprint())
        callbacks = self._job.callbacks
        if before is None:
            return
        if callbacks.on_regroup is not None:
            callbacks.on_regroup(news)
        for callback, workers in ((callbacks.on_newcomer, news.joined), (callbacks.on_leave, news.left)):
            if callback is not None:
                for worker in workers:
                    callback(worker)
