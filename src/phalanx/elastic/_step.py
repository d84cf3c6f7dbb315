"""Runs one step as the user sees it: an iterable of micro-batches, then ``commit``.

Owns what happens between the beginning of a step and its commit on this worker: gradients per slot, their sum, the
update. Weights, optimizer, scheduler, buffers and position change in ``commit`` only, after the last collective of
the step; a failure before that leaves them as they were, and the job takes the step over from a worker that has
applied it, or issues it again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx._torch_faults import check_fused
from phalanx.elastic._guard import Reaction
from phalanx.elastic._loading import Ticket
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.elastic._slot_logs import SlotLogs
from phalanx.elastic.membership._lost import LOST
from phalanx.elastic.reduce._divide import divide
from phalanx.elastic.reduce._early_send import Sending
from phalanx.elastic.reduce._flat_layout import SCALARS, Flat
from phalanx.elastic.reduce._norm_blocks import clip
from phalanx.elastic.reduce._partials import Partials
from phalanx.elastic.tools._step_clock import COMPUTE, DATA, WAIT

if TYPE_CHECKING:
    from phalanx.elastic._job import Job


class Outcome(Enum):
    """What ``Step.commit`` returns; true when the step is part of this worker's state.

    Code that follows a commit belongs under ``if step.commit():``. It then runs once per step on every worker that was
    there, also on one that took the step over from another.

    >>> [bool(outcome) for outcome in Outcome]
    [True, True, True, False]
    """

    APPLIED = "applied"
    """This worker made the update itself."""
    ADOPTED = "adopted"
    """A worker was lost when others had made the update and this one had not: it took over their state."""
    SKIPPED = "skipped"
    """The guard left the update out (``Guard``); the data position moved on, the weights did not, or went back to a
    save."""
    DROPPED = "dropped"
    """Nothing was applied anywhere; the loop gives the same step again."""

    def __bool__(self) -> bool:
        return self is not Outcome.DROPPED


class Micro:
    """One batch to compute: ``inputs`` and ``targets`` (or the whole ``batch``), then ``backward(loss)``."""

    def __init__(self, step: Step, ticket: Ticket, batch: Any, *, is_extra: bool = False) -> None:
        self.step = step
        self.slot = ticket.slot
        self.part = ticket.part
        self.indices = ticket.indices
        self.batch = batch
        self.is_extra = is_extra
        """Whether another worker computes it too, and this one only compares (``VerifySlots``)."""
        self.done = False

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    @property
    def inputs(self) -> Any:
        return self._pair()[0]

    @property
    def targets(self) -> Any:
        return self._pair()[1]

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Compute gradients. ``loss`` is a mean over the batch; ``weight`` says over how much.

        The step's gradient is ``sum(weight * gradient) / sum(weight)`` over all slots of all workers. By default
        the weight is the number of samples; give the number of tokens for a mean over tokens.
        """
        if self.done:
            raise RuntimeError(
                f"backward was called twice for slot {self.slot} part {self.part} of step {self.step.number}; "
                "add the losses up and call it once"
            )
        _refuse_context_parallel(self.slot)
        job = self.step.job
        share = self.num_samples / job.slot_batch_size if weight is None else float(weight)
        if share < 0 or not math.isfinite(share):
            raise ValueError(f"weight is {share} for slot {self.slot}; expected a finite number, at least 0")
        self.done = True
        value = float(loss.detach())
        if share:  # the mean over no tokens is nan, and nan * 0 is too: leave it out
            scaled = loss if share == 1.0 else loss * share
            whole = job.scaler.scale(scaled) if job.scaler is not None else scaled
            self.step.run_backward(whole, is_extra=self.is_extra)
        else:
            self.step.skip_backward(loss)
        note = job.guarding.note_loss(value) if share else 0
        self.step._count(value * share if share else 0.0, share, self.num_samples, note)

    def log(self, name: str, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        """Add a mean over this micro-batch to those of the step: ``step.logs[name]``, the same on all workers.

        It is the mean over all micro-batches of all slots, by ``weight``: the number of samples by default. A second
        value under the same name counts as one more micro-batch.
        """
        share = float(self.num_samples if weight is None else weight)
        if not self.is_extra:  # its own worker logs it
            self.step.log(self.slot, name, float(value), share)

    def _pair(self) -> Any:
        if not isinstance(self.batch, (tuple, list)) or len(self.batch) != 2:
            raise TypeError(
                f"a batch of this dataset is a {type(self.batch).__name__}, not a pair; use micro.batch instead"
            )
        return self.batch


def _refuse_context_parallel(slot: int) -> None:
    """Raise inside of ``context_parallel``: its ranks have parts of one sequence, workers of a job have slots."""
    module = sys.modules.get("phalanx.fsdp.context._context_parallel")  # who is inside has loaded it
    if module is not None and module.is_entered():
        raise ValueError(
            f"slot {slot}: micro.backward() inside context_parallel: the gradient of a part of the sequence would be "
            "taken for that of the slot. A job does not add up contexts yet; use tensor parallelism "
            "(phalanx.elastic.job_mesh), or train without a job"
        )


class Step:
    """One update from all slots; made by ``Job.steps``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.number = job.schedule.step
        self.epoch = job.schedule.epoch
        self.slots = job.regrouping.reduction.slots
        self.outcome: Outcome | None = None
        """How it ended here; None while it is under way."""
        self.is_again = False
        """Whether it was computed before and its gradient was not finite; known after the reduction."""
        self.loss: float | None = None
        """Weighted mean over all slots of all workers; known after the reduction."""
        self.num_samples = 0
        self.grad_norm: float | None = None
        self.logs: dict[str, float] = {}
        """Means over all slots of what was logged (``Micro.log``), by name; known after the reduction."""
        self.is_unscaled = False
        """Whether the loss scale is out of the gradients."""
        self.is_known_finite = False
        """Whether the reduced gradient was looked at and is finite, and the loop had no chance to change it since."""
        self._slot_logs = SlotLogs()
        self.wish = False
        """Whether any worker wants to regroup at the boundary after this step."""
        self.num_leaving = 0
        self._partials = Partials(job.pool, job.num_slots)
        self._sums = dict.fromkeys(("loss", "weight", "samples"), 0.0)
        self._note = 0
        self._num_computed = 0
        self._root: Flat | None = None
        self._is_last = False
        """Whether this worker computes nothing more of the step after the micro-batch that it is at."""
        self._sending: Sending | None = None
        """Of this worker's last slot, when its gradients are sent while they come."""
        job.clock.begin()

    @property
    def is_last_of_epoch(self) -> bool:
        return self.number + 1 == self.job.schedule.sampler.end_of_epoch(self.number)

    @property
    def committed(self) -> bool:
        """Return whether it is part of this worker's state."""
        return bool(self.outcome)

    @property
    def dropped(self) -> bool:
        """Return whether it comes again."""
        return self.outcome is Outcome.DROPPED

    def __iter__(self) -> Iterator[Micro]:
        extra = self.job.verifying.extra_slots()
        for slot in (*extra, *self.slots):
            is_extra = bool(extra) and slot == extra[0]  # another worker's, computed to be compared
            if self.job.regrouping.is_broken:
                return  # commit() will regroup; what follows would be thrown away
            self._begin_slot()
            tickets = self.job.schedule.tickets(self.number, slot)
            for ticket in tickets:
                self.job.position.note(self.number, slot, ticket.indices)
                self.job.clock.lap(COMPUTE)
                batch = self.job.loading.batch(ticket) if not is_extra else self.job.loading.fetcher[ticket]
                self.job.clock.lap(DATA)
                seed_everything(derive_seed(self.job.seed, "compute", ticket.step, slot, ticket.part))
                micro = Micro(self, ticket, batch, is_extra=is_extra)
                self._is_last = slot == self.slots.stop - 1 and ticket is tickets[-1]
                yield micro
                self._check_done(micro)
            if is_extra:
                grads = [param.grad for param in self.job.params]
                self.job.verifying.computed(slot, grads, self._sums)
                self.job.guarding.note_grads(grads)  # and forget: what is wrong with it its own worker tells
                self.job.clock.end_slot()
            else:
                self._end_slot(slot, [index for ticket in tickets for index in ticket.indices])

    def _check_done(self, micro: Micro) -> None:
        if not micro.done:
            raise RuntimeError(
                f"micro.backward(loss) was not called for slot {micro.slot} of step {self.number}; "
                "call it once per micro-batch"
            )

    def run_backward(self, loss: Tensor, *, is_extra: bool = False) -> None:
        """Compute the gradients of a weighted loss; send them while they come if nothing can be added to them later."""
        early, reduction = self.job.early, self.job.regrouping.reduction
        if early is None or not self._is_last or reduction.is_alone or self.job.regrouping.is_broken:
            loss.backward()
            return
        self._sending = early.begin(reduction, self._partials, self.slots.stop - 1)
        with early.watch(self._sending):
            loss.backward()

    def skip_backward(self, loss: Tensor) -> None:
        """Leave out a loss without weight."""

    def _count(self, loss: float, weight: float, samples: int, note: int) -> None:
        self._note |= note
        for name, value in (("loss", loss), ("weight", weight), ("samples", samples)):
            self._sums[name] += value

    def log(self, slot: int, name: str, value: float, weight: float) -> None:
        """Keep a number that a slot has logged. For ``Micro`` only."""
        self._slot_logs.add(slot, name, value, weight)
        self._sums["logs"] = 1.0  # rides along: who has no slot hears by it that there is something to gather

    def _begin_slot(self) -> None:
        self.job.buffers.restore()
        for param in self.job.params:
            param.grad = None
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._note = 0

    def _end_slot(self, slot: int, indices: list[int]) -> None:
        job = self.job
        grads = [param.grad for param in job.params]
        for name, grad in zip(job.param_names, grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(f"{name} has a {grad.layout} gradient; elastic jobs sum dense gradients only")
        job.verifying.computed(slot, grads, self._sums)
        note = self._note | job.guarding.note_grads(grads)
        push = self._partials.begin(slot) if self._sending is None else self._sending.push
        if self._sending is not None:
            self._sending.check()
        buffers = job.buffers.live() if slot == 0 else None
        push.finish(grads, self._sums, buffers, note, job.clock.end_slot())
        job.position.note(self.number)
        job.audit.computed(job.lineage, self.epoch, self.number, slot, indices)
        job.regrouping.coordinator.report(self.number)
        self._num_computed += 1

    def reduce(self) -> bool:
        """Sum the gradients over all slots; afterwards each ``param.grad`` is the step's, equal on all workers.

        ``commit`` does it; call it yourself to look at or change the gradients before the update. False when a worker
        was lost: the group is formed anew, and ``outcome`` says whether the step comes again or was taken over.
        """
        job = self.job
        if self.outcome is not None or self._root is not None:
            return self.outcome is None
        if not job.regrouping.is_broken and self._num_computed != len(self.slots):
            raise RuntimeError(
                f"step {self.number}: slots {list(self.slots[self._num_computed :])} of this worker were not "
                "computed; iterate over the whole step before commit()"
            )
        try:
            job.regrouping.check()
            wishes = job.regrouping.wishes(is_again=job.guarding.is_again)
            if self._partials.pieces:  # a worker without slots has nothing to let them ride on; its store keys tell
                self._partials.pieces[0][1].scalars.add_(wishes)
            job.audit.write_computed()
            job.clock.lap(COMPUTE)
            job.regrouping.coordinator.waiting(True)
            if self._sending is None:
                self._root = job.regrouping.reduction.reduce(self._partials)
            elif self._sending.error is not None:
                raise self._sending.error
            else:
                self._root = self._sending.sums.finish()
            is_doubtful = job.verifying.finds_fault(self, self._root)
            job.regrouping.coordinator.waiting(False)
            job.clock.lap(WAIT)
        except LOST as error:
            job.clock.lap(WAIT)
            if self._root is not None:  # it was complete, and a worker is lost because of what it is
                job.pool.give(self._root)
                self._root = None
            # In shared memory everybody fetches for itself, and this worker has stopped: who still reads its copies has
            # to stop as well before they meet again. New ones would cost as much as the rest of the regroup.
            if self._sending is not None or not job.regrouping.reduction.in_place:
                self._partials.abandon()
            self._drop()
            self.outcome = job.recover_from(self, error)
            return False
        if is_doubtful:
            job.pool.give(self._root)
            self._drop()
            self._root, self.outcome = None, Outcome.DROPPED
            return False
        if not self._gather_logs(self._root):
            return False
        self._take(self._root)
        return True

    def _gather_logs(self, root: Flat) -> bool:
        """Tell each other what was logged, if anything was; False when a worker was lost meanwhile."""
        if not root.scalars[SCALARS.index("logs")]:
            return True
        job = self.job
        try:
            job.regrouping.coordinator.waiting(True)
            self.logs = self._slot_logs.gather(job.regrouping.membership.group)
            job.regrouping.coordinator.waiting(False)
        except LOST as error:
            job.pool.give(root)
            self._drop()
            self.outcome = job.recover_from(self, error)
            return False
        return True

    def unscale(self) -> bool:
        """Sum the gradients as ``reduce`` does, and take the loss scale of ``Job(scaler=...)`` out of them.

        ``commit`` does it; call it yourself where gradients are looked at, clipped or changed before the update.
        """
        if not self.reduce():
            return False
        if self.job.scaler is not None and not self.is_unscaled:
            self._unscale()
        self.is_unscaled = True
        return True

    def _unscale(self) -> None:
        self.job.scaler.unscale_(self.job.optimizer)

    def _take(self, root: Flat) -> None:
        sums = dict(zip(SCALARS, root.scalars.tolist(), strict=True))
        used = root.used.tolist()
        weight = sums["weight"]
        if weight > 0:
            self.is_known_finite = bool(divide(root.summed_grads(), weight, looks=self.job.guarding.is_on))
            self.loss = sums["loss"] / weight
        for param, grad, count in zip(self.job.params, root.grads, used, strict=True):
            param.grad = grad if count else None
        self.num_samples = int(sums["samples"])
        self.wish, self.num_leaving = sums["wish"] > 0, int(sums["leaving"])
        self.is_again = sums["again"] > 0
        self.job.dealing.note(root.times[0], self)

    def commit(self, max_grad_norm: float | None = None) -> Outcome:
        """Apply the update; model, optimizer, scheduler and data position move together.

        ``max_grad_norm`` clips by the norm over the whole reduced gradient as ``clip_grad_norm_`` does; the norm is
        summed over fixed blocks, so that it has the same bits however the gradient is sharded. What ``commit`` returns
        is true when the step is part of this worker's state: applied here, or adopted from a worker that was ahead when
        another was lost. When the step was dropped it is false, and the same step comes again; the loop simply goes on.

        Raises ``NonFinite``, on all workers alike and before anything is applied, when the loss or the gradient has
        values that are not finite (see ``Guard``).
        """
        if self.outcome is Outcome.APPLIED:
            raise RuntimeError(f"step {self.number} is committed already")
        is_reduced = self._root is not None
        if not self.reduce():
            assert self.outcome is not None, "a step that is not reduced was dropped or adopted"
            return self.outcome
        if is_reduced:
            self.is_known_finite = False  # the loop had the gradients in its hands: those that are there now count
        job = self.job
        assert self._root is not None, "reduce() returned True"
        reaction = job.guarding.judge(self, self._root)
        if reaction is Reaction.COMPUTE_AGAIN:
            job.pool.give(self._root)
            self._drop()
            self.outcome = Outcome.DROPPED
            return self.outcome
        if reaction in (Reaction.SKIP, Reaction.RAISE, Reaction.ROLL_BACK):
            return self._skip(reaction)
        if reaction is Reaction.GO_ON or not job.guarding.spoils_buffers(self._root):
            self._root.get_buffers(job.buffers.live())
        else:
            job.buffers.restore()
        self.unscale()
        if max_grad_norm is not None:
            grads = [param.grad for param in job.params]
            self.grad_norm = clip(grads, [param.numel() for param in job.params], max_grad_norm)
            reaction = job.guarding.judge_norm(self, self._root, self.grad_norm)
            if reaction in (Reaction.SKIP, Reaction.RAISE):
                return self._skip(reaction)
        check_fused(job.optimizer, "Job")  # again: a loaded state may have brought other options
        if job.scaler is not None:
            job.scaler.step(job.optimizer)
            job.scaler.update()
        else:
            job.optimizer.step()
        job.pool.give(self._root)
        self.outcome = Outcome.APPLIED
        job.guarding.applied(self)
        job.advance(self)
        return self.outcome

    def _skip(self, reaction: Reaction) -> Outcome:
        """Commit the step without its update, after the way back to a save if that is the reaction."""
        assert self._root is not None, "only a reduced step is judged"
        error = self.job.guarding.error_of(self, self._root) if reaction is Reaction.RAISE else None
        self.job.pool.give(self._root)
        self._drop()
        try:
            self.job.guarding.leave_out(self, reaction)
        except LOST as error:
            self.outcome = self.job.recover_from(self, error)
            return self.outcome
        self.outcome = Outcome.SKIPPED
        self.job.advance(self)
        if error is not None:
            raise error
        return self.outcome

    def adopt(self) -> None:
        """Be what the worker whose state was taken over has committed."""
        job = self.job
        self.outcome = Outcome.ADOPTED
        self.loss, self.grad_norm, self.logs = job.loss, job.grad_norm, job.logs
        sampler = job.schedule.sampler
        self.num_samples = sum(len(sampler.indices(self.number, slot)) for slot in range(job.num_slots))

    def _drop(self) -> None:
        self.job.audit.write_computed()
        self._partials.drop()
        self.job.buffers.restore()
        for param in self.job.params:
            param.grad = None
