"""One step of a sharded job: waves of slots, sums at the owners, the commit point, the update of this worker's cells.

Phases, each entered by all workers together:

1. waves: in wave j worker r computes slot ``j * size + r``; gathers and reductions happen inside forward and backward.
2. ``reduce``: the slots' numbers to all, slot 0's buffers to all, reduced gradients to the mirrors. Then the worker is
   *prepared*: it can make the update of everything it holds.
3. ``commit``: one all-gather of what the owners find in their gradients (squares, whether finite): the *commit point*.
   Who passes it knows that all are prepared, and applies.

Invariants: the commit point is entered only when prepared; weights, optimizer, scheduler, buffers and position change
after it only. Between it and the end of the update there is no collective, but for one where something is not finite
(``_findings``): who is lost there leaves the others prepared, and perhaps some of them ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from phalanx._torch_faults import check_fused
from phalanx.elastic._guard import Reaction
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.elastic._sharded_guarding import Findings, ShardedGuarding
from phalanx.elastic._sharded_verifying import ShardedVerifying
from phalanx.elastic._step import Micro, Outcome, Step
from phalanx.elastic.membership._lost import LOST
from phalanx.elastic.reduce._divide import divide
from phalanx.elastic.sharded._mirroring import spread_gradients
from phalanx.elastic.sharded._scaled_update import clip, unscale, update_scaled
from phalanx.elastic.sharded._slot_numbers import SlotRow, StepNumbers, exchange_buffers, exchange_numbers
from phalanx.elastic.sharded._slot_reduction import Wave
from phalanx.elastic.sharded._verdict import StepVerdict, exchange_verdict
from phalanx.elastic.tools._step_clock import COMPUTE, DATA
from phalanx.errors import CommError

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic.sharded._sharding import JobSharding


class ShardedStep(Step):
    """A step whose model lies in cells."""

    def __init__(self, job: Job, sharding: JobSharding) -> None:
        super().__init__(job)
        self._sharding = sharding
        self._rows: dict[int, SlotRow] = {}
        self._first_buffers: list[Tensor] | None = None
        self._buffers: list[Tensor] = []
        self._found_inf = False
        self.numbers: StepNumbers | None = None
        """What all workers know when it is reduced: then this worker is prepared."""
        self.verdict: StepVerdict | None = None
        """What all workers know when they have passed the commit point."""
        self._max_norm: float | None = None
        self._began = time.monotonic()
        self._plan = sharding.waves
        self._slot_seconds: list[float] = []
        self._wave_seconds = 0.0
        sharding.before_step()
        sharding.passes.renew()
        sharding.step = self

    # ---- waves

    def __iter__(self) -> Iterator[Micro]:
        waves = self._waves()
        while True:
            try:
                micro = next(waves, None)
            except LOST as error:
                self._lose(error)
                return
            if micro is None:
                return
            yield micro

    def _waves(self) -> Iterator[Micro]:
        first = 0
        for ranks in self._plan.waves:
            num_parts = {
                rank: len(self.job.schedule.tickets(self.number, slot)) for slot, rank in enumerate(ranks, first)
            }
            yield from self._wave(Wave(first, ranks, tuple(r for r, count in num_parts.items() if count)), num_parts)
            if self._is_lost:
                return
            first += len(ranks)
        self._wave_seconds = self.job.clock.since_begin()
        if self._verifying.extra is not None:
            yield from self._extra_wave(*self._verifying.extra)

    def _extra_wave(self, slot: int, by: int) -> Iterator[Micro]:
        """Have one worker compute a slot once more, to compare it; its gradients go nowhere, and the others follow."""
        sharding, rank, job = self._sharding, self._sharding.live_group.rank, self.job
        sharding.set_reduces(False)
        if rank == by:
            self._begin_slot()
            self._verifying.watch(slot)
        for ticket in job.schedule.tickets(self.number, slot):
            if self._is_lost:
                return
            sharding.passes.begin([by], is_step=True)
            if rank != by:
                sharding.passes.follow()
                continue
            batch = job.loading.fetcher[ticket]
            seed_everything(derive_seed(job.seed, "compute", self.number, slot, ticket.part))
            micro = Micro(self, ticket, batch, is_extra=True)
            yield micro
            self._check_done(micro)
            sharding.passes.end()
        if rank == by:
            self._verifying.computed_slot(self._sums)
        job.clock.end_slot()

    def _wave(self, wave: Wave, num_parts: dict[int, int]) -> Iterator[Micro]:
        """Compute this worker's slot of the wave, or follow those who have one; ``num_parts`` by rank."""
        sharding, rank, clock = self._sharding, self._sharding.live_group.rank, self.job.clock
        sharding.begin_wave(wave, self._verifying.messages)
        mine = wave.first_slot + wave.ranks.index(rank) if rank in wave.ranks else None
        clock.end_slot()  # what the slot took begins here
        if mine is not None:
            self._begin_slot()
            self._verifying.watch(mine)
        tickets = self.job.schedule.tickets(self.number, mine) if mine is not None else []
        num_passes = max(num_parts.values())
        for part in range(num_passes):
            if self._is_lost:
                return
            computing, reduces = [r for r, count in num_parts.items() if count > part], part == num_passes - 1
            sharding.passes.begin(computing, is_step=True, reduces=reduces)
            sharding.set_reduces(reduces)
            if part >= len(tickets):
                sharding.passes.follow()
                continue
            clock.lap(COMPUTE)
            batch = self.job.loading.batch(tickets[part])
            clock.lap(DATA)
            assert mine is not None, "it has tickets"
            seed_everything(derive_seed(self.job.seed, "compute", self.number, mine, part))
            micro = Micro(self, tickets[part], batch)
            yield micro
            self._check_done(micro)
            sharding.passes.end()
        if self._is_lost:
            return
        if mine is not None:
            self._verifying.computed_slot(self._sums)
            self._slot_seconds.append(clock.end_slot()[0])
            self._end_slot(mine, [index for ticket in tickets for index in ticket.indices])
        sharding.end_wave(wave, several_parts=num_passes > 1)

    @property
    def _is_lost(self) -> bool:
        return self._sharding.passes.lost is not None or self.job.regrouping.is_broken

    def _lose(self, error: CommError) -> None:
        if self._sharding.passes.lost is None:
            self._sharding.passes.lost = error

    def run_backward(self, loss: Tensor, *, is_extra: bool = False) -> None:
        """Compute gradients, unless a worker was lost: then the step will be dropped. Those of an extra one are only
        looked at."""
        if is_extra:
            self._sharding.mute(True)
            try:
                self.run_backward(loss)
            finally:
                self._sharding.mute(False)
            return
        if self._sharding.passes.lost is not None:
            return
        try:
            loss.backward()
        except LOST as error:
            self._lose(error)

    def skip_backward(self, loss: Tensor) -> None:
        """Take part in the backward pass of the others with a loss that has no weight."""
        self._sharding.mute(True)
        try:
            self.run_backward(loss * 0.0)
        finally:
            self._sharding.mute(False)

    def _begin_slot(self) -> None:
        self.job.buffers.restore()
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._note = 0
        self._guarding.take_note()  # and forget: that of a slot which was computed to compare it

    def _end_slot(self, slot: int, indices: list[int]) -> None:
        job = self.job
        self._rows[slot] = SlotRow(
            dict(self._sums), self._sharding.take_used(), self._note | self._guarding.take_note()
        )
        if slot == 0:
            self._first_buffers = [buffer.detach().clone() for buffer in job.buffers.live()]
        if self._sharding.tensor_groups is None or self._sharding.tensor_groups.lane == 0:  # once for its group
            job.audit.computed(job.lineage, self.epoch, self.number, slot, indices)
        job.regrouping.coordinator.report(self.number)

    # ---- reduce

    def reduce(self) -> bool:
        if self.outcome is not None or self.numbers is not None:
            return self.outcome is None
        missing = [slot for slot in self.slots if slot not in self._rows]
        if missing and not self._is_lost:
            raise RuntimeError(
                f"step {self.number}: slots {missing} of this worker were not computed; iterate over the whole step "
                "before commit()"
            )
        try:
            numbers = self._exchange()
            is_doubtful = self._verifying.compare(self, self._sharding.live_group)
        except LOST as error:
            self.outcome = self._recover(error)
            return False
        if is_doubtful:
            self._drop()
            self.outcome = Outcome.DROPPED
            return False
        self.numbers = numbers  # from here on it is prepared
        self._take_numbers(numbers)
        return True

    def _exchange(self) -> StepNumbers:
        """Make this worker prepared."""
        job, sharding = self.job, self._sharding
        job.audit.write_computed()
        if sharding.passes.lost is not None:
            raise sharding.passes.lost
        job.regrouping.check()
        group = sharding.live_group
        sharding.passes.waits(True)
        numbers = exchange_numbers(
            group,
            self._rows,
            {
                **job.regrouping.own_wishes(is_again=job.guarding.is_again),
                **sharding.pace(),
                **self._pace(),
                **self._requests(),
            },
            waves=self._plan,
            num_params=len(sharding.trained),
        )
        if sharding.tensor_groups is not None:
            numbers = sharding.tensor_groups.join_numbers(sharding.everyone, numbers, group.rank)
        if numbers.sums["logs"]:
            self.logs = self._slot_logs.gather(group)
        self._buffers = exchange_buffers(group, self._first_buffers, job.buffers.live())
        spread_gradients(sharding.store, group, self._verifying.messages)
        sharding.passes.waits(False)
        return numbers

    def _pace(self) -> dict[str, float]:
        """Return what a slot took this worker, without its data and without waiting for others, and what waves took."""
        pace = sum(self._slot_seconds) / len(self._slot_seconds) if self._slot_seconds else 0.0
        return {"pace": pace, "waves": self._wave_seconds}

    def _requests(self) -> dict[str, float]:
        """Return how many requests for a save this worker knows of: all, and those that are dealt with."""
        asked = self.job.regrouping.coordinator.signals.saves_asked
        return {"asked": float(asked), "answered": float(self._sharding.saves_answered)}

    def _unscale(self) -> None:
        self._found_inf = unscale(self.job.scaler, self._sharding.store.pieces)

    def adopt(self) -> None:
        super().adopt()
        self.wish, self.num_leaving = False, 0  # what was wished was so in the group that is gone

    def _take_numbers(self, numbers: StepNumbers) -> None:
        self._sharding.numbers = numbers
        sums, store = numbers.sums, self._sharding.store
        weight = sums["weight"]
        if weight > 0:
            grads = [held.grad for held in store.sections.values()]
            self.is_known_finite = bool(divide(grads, weight, looks=self._guarding.is_on))
            self.loss = sums["loss"] / weight
        for piece in store.pieces:
            number = self._sharding.number_of(piece.key)
            piece.tensor.grad = piece.grad if number is not None and numbers.used[number] else None
        self.num_samples = int(sums["samples"])
        self.wish, self.num_leaving = sums["wish"] > 0, int(sums["leaving"])
        self.is_again = sums["again"] > 0
        paces, waves = zip(*((one["pace"], one["waves"]) for one in numbers.wishes), strict=True)
        self.job.dealing.note_pace(paces, self, max(waves))

    # ---- commit

    def commit(self, max_grad_norm: float | None = None) -> Outcome:
        if self.outcome is Outcome.APPLIED:
            raise RuntimeError(f"step {self.number} is committed already")
        is_reduced = self.numbers is not None
        if not self.reduce():
            assert self.outcome is not None, "a step that is not reduced was dropped or adopted"
            return self.outcome
        job = self.job
        if is_reduced or job.scaler is not None:
            self.is_known_finite = False  # what is there now counts: the loop's, or without the scale
        self._max_norm = max_grad_norm
        try:
            self.verdict = self._pass_commit_point()
            findings = self._findings(self.verdict)
        except LOST as error:
            self.verdict = None
            self.outcome = self._recover(error)
            return self.outcome
        reaction = self._judge(findings, self.verdict)
        if reaction is Reaction.COMPUTE_AGAIN:
            self._drop()
            self.outcome = Outcome.DROPPED
            return self.outcome
        if reaction in (Reaction.SKIP, Reaction.RAISE, Reaction.ROLL_BACK):
            return self._leave_out(reaction, findings, self.verdict)
        self.apply(self.verdict)
        job.guarding.applied(self)
        self.outcome = Outcome.APPLIED
        job.advance(self)
        return self.outcome

    def _judge(self, findings: Findings, verdict: StepVerdict) -> Reaction:
        guarding = self._guarding
        guarding.verdict = verdict
        reaction = guarding.judge(self, findings)
        if self._max_norm is not None and reaction in (Reaction.GO_ON, Reaction.LEAVE_TO_SCALER):
            assert verdict.norm is not None, "it was asked for"
            about_norm = guarding.judge_norm(self, findings, verdict.norm)
            if about_norm in (Reaction.SKIP, Reaction.RAISE):
                self.grad_norm = verdict.norm
                return about_norm
        return reaction

    @property
    def _guarding(self) -> ShardedGuarding:
        found = self.job.guarding
        assert isinstance(found, ShardedGuarding), "that of a sharded job"
        return found

    @property
    def _verifying(self) -> ShardedVerifying:
        found = self.job.verifying
        assert isinstance(found, ShardedVerifying), "that of a sharded job"
        return found

    def _leave_out(self, reaction: Reaction, findings: Findings, verdict: StepVerdict) -> Outcome:
        """Commit the step without its update, after the way back to a save if that is the reaction."""
        job = self.job
        job.buffers.restore()
        raised = self._guarding.error_of(self, findings) if reaction is Reaction.RAISE else None
        try:
            self._guarding.leave_out(self, reaction)
        except LOST as error:
            self.verdict = None
            self.outcome = self._recover(error)
            return self.outcome
        back_to = self._guarding.back_to if reaction is Reaction.ROLL_BACK else None
        self._end(replace(verdict, is_skipped=True, back_to=back_to))
        self.outcome = Outcome.SKIPPED
        job.advance(self)
        if raised is not None:
            raise raised
        return self.outcome

    def follow(self, verdict: StepVerdict) -> None:
        """Be behind the step as another worker is, which has told its verdict."""
        if verdict.is_skipped:
            self.job.buffers.restore()
            self._end(verdict)
        else:
            self.apply(verdict)
        self._guarding.follow(self, verdict)

    def _pass_commit_point(self) -> StepVerdict:
        job, sharding = self.job, self._sharding
        assert self.numbers is not None, "it is prepared"
        self.unscale()
        job.regrouping.check()
        sharding.passes.waits(True)
        verdict = exchange_verdict(
            sharding.live_group,
            sharding.store,
            [one for one, counts in zip(sharding.trained, sharding.in_norm, strict=True) if counts],
            [used for used, counts in zip(self.numbers.used, sharding.in_norm, strict=True) if counts],
            is_finite=self.is_known_finite or not self._guarding.is_on or self._guarding.holds_finite(),
            found_inf=self._found_inf,
            with_norm=self._max_norm is not None or self._guarding.wants_norm,
        )
        if sharding.tensor_groups is not None:  # then only this is the commit point
            verdict = sharding.tensor_groups.join_verdicts(sharding.everyone, verdict)
        sharding.passes.waits(False)
        return verdict

    def _findings(self, verdict: StepVerdict) -> Findings:
        """Return what the guard looks at; if something is not finite, all workers tell each other what it is."""
        assert self.numbers is not None, "it is prepared"
        guarding = self._guarding
        bad = () if verdict.is_finite or not guarding.is_on else guarding.bad_grads()
        return Findings(self.numbers.notes, self._buffers, bad)

    def apply(self, verdict: StepVerdict) -> None:
        """Make the update: the step is committed, whoever is lost from here on."""
        job, sharding = self.job, self._sharding
        if verdict.is_finite or not job.guarding.spoils_buffers(self._findings_of_buffers()):
            for buffer, value in zip(job.buffers.live(), self._buffers, strict=True):
                buffer.detach().copy_(value)
        else:
            job.buffers.restore()
        if self._max_norm is not None:
            assert verdict.norm is not None, "it was asked for"
            self.grad_norm = verdict.norm
            clip(sharding.store.pieces, verdict.norm, self._max_norm)
        check_fused(job.optimizer, "Job")  # again: a loaded state may have brought other options
        if job.scaler is not None:
            update_scaled(job.scaler, sharding.pieces, found_inf=verdict.found_inf)
        else:
            sharding.pieces.step()
        self._end(verdict)

    def _end(self, verdict: StepVerdict) -> None:
        sharding = self._sharding
        sharding.drop_step()
        sharding.step, sharding.last_verdict = None, verdict
        sharding.seconds = time.monotonic() - self._began

    def _findings_of_buffers(self) -> Findings:
        assert self.numbers is not None, "it is prepared"
        return Findings(self.numbers.notes, self._buffers, ())

    def _recover(self, error: CommError) -> Outcome:
        job = self.job
        job.buffers.restore()  # the regroup compares states; a step that is rolled forward brings its own
        if self.numbers is None:
            self._drop()
        outcome = job.recover_from(self, error)
        if outcome is Outcome.DROPPED and self.numbers is not None:
            self._drop()
        return outcome

    def _drop(self) -> None:
        self._sharding.drop_step()
        self.job.buffers.restore()
        self._sharding.step = None
