"""Runs one step as the user sees it: an iterable of micro-batches, then ``commit``.

Owns what happens between the beginning of a step and its commit on this worker: gradients per slot, their sum, the
update. Weights, optimizer, scheduler, buffers and position change in ``commit`` only, after the last collective of
the step; a failure before that leaves them as they were, and the job takes the step over from a worker that has
applied it, or issues it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx._torch_faults import check_fused
from phalanx.elastic._guard import Reaction
from phalanx.elastic._loading import Ticket
from phalanx.elastic._rng import derive_seed, seed_everything
from phalanx.elastic.membership._regroup import LOST
from phalanx.elastic.reduce._flat_layout import SCALARS, Flat
from phalanx.elastic.reduce._partials import Partials

if TYPE_CHECKING:
    from phalanx.elastic._job import Job


class Outcome(Enum):
    """What ``Step.commit`` returns; true when the step is part of this worker's state.

    Code that follows a commit belongs under ``if step.commit():``. It then runs once per step on every worker that was
    there, also on one that took the step over from another.

    >>> [bool(outcome) for outcome in Outcome]
    [True, True, False]
    """

    APPLIED = "applied"
    """This worker made the update itself."""
    ADOPTED = "adopted"
    """A worker was lost when others had made the update and this one had not: it took over their state."""
    DROPPED = "dropped"
    """Nothing was applied anywhere; the loop gives the same step again."""

    def __bool__(self) -> bool:
        return self is not Outcome.DROPPED


class Micro:
    """One batch to compute: ``inputs`` and ``targets`` (or the whole ``batch``), then ``backward(loss)``."""

    def __init__(self, step: Step, ticket: Ticket, batch: Any) -> None:
        self.step = step
        self.slot = ticket.slot
        self.part = ticket.part
        self.indices = ticket.indices
        self.batch = batch
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
        job = self.step.job
        share = self.num_samples / job.slot_batch_size if weight is None else float(weight)
        if share < 0 or not math.isfinite(share):
            raise ValueError(f"weight is {share} for slot {self.slot}; expected a finite number, at least 0")
        self.done = True
        value = float(loss.detach())
        if share:  # the mean over no tokens is nan, and nan * 0 is too: leave it out
            scaled = loss if share == 1.0 else loss * share
            (job.scaler.scale(scaled) if job.scaler is not None else scaled).backward()
        note = job.guarding.note_loss(value) if share else 0
        self.step._count(value * share if share else 0.0, share, self.num_samples, note)

    def _pair(self) -> Any:
        if not isinstance(self.batch, (tuple, list)) or len(self.batch) != 2:
            raise TypeError(
                f"a batch of this dataset is a {type(self.batch).__name__}, not a pair; use micro.batch instead"
            )
        return self.batch


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
        self.wish = False
        """Whether any worker wants to regroup at the boundary after this step."""
        self.num_leaving = 0
        self._partials = Partials(job.pool, job.num_slots)
        self._sums = dict.fromkeys(("loss", "weight", "samples"), 0.0)
        self._note = 0
        self._next_slot = self.slots.start
        self._root: Flat | None = None
        self._micro: Micro | None = None

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
        for slot in self.slots:
            if self.job.regrouping.is_broken:
                return  # commit() will regroup; what follows would be thrown away
            self._begin_slot()
            tickets = self.job.schedule.tickets(self.number, slot)
            for ticket in tickets:
                batch = self.job.loading.batch(ticket)
                seed_everything(derive_seed(self.job.seed, "compute", ticket.step, slot, ticket.part))
                micro = Micro(self, ticket, batch)
                yield micro
                if not micro.done:
                    raise RuntimeError(
                        f"micro.backward(loss) was not called for slot {slot} of step {self.number}; "
                        "call it once per micro-batch"
                    )
            self._end_slot(slot, [index for ticket in tickets for index in ticket.indices])

    def _count(self, loss: float, weight: float, samples: int, note: int) -> None:
        self._note |= note
        for name, value in (("loss", loss), ("weight", weight), ("samples", samples)):
            self._sums[name] += value

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
        note = self._note | job.guarding.note_grads(grads)
        self._partials.push(slot, grads, self._sums, job.buffers.live() if slot == 0 else None, note)
        job.audit.computed(job.lineage, self.epoch, self.number, slot, indices)
        job.regrouping.coordinator.report(self.number)
        self._next_slot = slot + 1

    def reduce(self) -> bool:
        """Sum the gradients over all slots; afterwards each ``param.grad`` is the step's, equal on all workers.

        ``commit`` does it; call it yourself to look at or change the gradients before the update. False when a worker
        was lost: the group is formed anew, and ``outcome`` says whether the step comes again or was taken over.
        """
        job = self.job
        if self.outcome is not None or self._root is not None:
            return self.outcome is None
        if not job.regrouping.is_broken and self._next_slot != self.slots.stop:
            raise RuntimeError(
                f"step {self.number}: slots {list(range(self._next_slot, self.slots.stop))} of this worker were not "
                "computed; iterate over the whole step before commit()"
            )
        try:
            job.regrouping.check()
            wishes = job.regrouping.wishes(is_again=job.guarding.is_again)
            if self._partials.pieces:  # a worker without slots has nothing to let them ride on; its store keys tell
                self._partials.pieces[0][1].scalars.add_(wishes)
            job.regrouping.coordinator.waiting(True)
            self._root = job.regrouping.reduction.reduce(self._partials)
            job.regrouping.coordinator.waiting(False)
        except LOST as error:
            self._partials.abandon()
            self._drop()
            self.outcome = job.recover_from(self, error)
            return False
        self._take(self._root)
        return True

    def _take(self, root: Flat) -> None:
        sums = dict(zip(SCALARS, root.scalars.tolist(), strict=True))
        used = root.used.tolist()
        weight = sums["weight"]
        if weight > 0:
            if weight != 1.0:
                for flat in root.summed_grads():
                    flat.div_(weight)
            self.loss = sums["loss"] / weight
        for param, grad, count in zip(self.job.params, root.grads, used, strict=True):
            param.grad = grad if count else None
        self.num_samples = int(sums["samples"])
        self.wish, self.num_leaving = sums["wish"] > 0, int(sums["leaving"])
        self.is_again = sums["again"] > 0

    def commit(self, max_grad_norm: float | None = None) -> Outcome:
        """Apply the update; model, optimizer, scheduler and data position move together.

        ``max_grad_norm`` clips by the norm over the whole reduced gradient. What it returns is true when the step is
        part of this worker's state: applied here, or adopted from a worker that was ahead when another was lost. When
        the step was dropped it is false, and the same step comes again; the loop simply goes on.

        Raises ``NonFinite``, on all workers alike and before anything is applied, when the loss or the gradient has
        values that are not finite (see ``Guard``).
        """
        if self.outcome is Outcome.APPLIED:
            raise RuntimeError(f"step {self.number} is committed already")
        if not self.reduce():
            assert self.outcome is not None, "a step that is not reduced was dropped or adopted"
            return self.outcome
        job = self.job
        assert self._root is not None, "reduce() returned True"
        reaction = job.guarding.judge(self, self._root)
        if reaction is Reaction.COMPUTE_AGAIN:
            job.pool.give(self._root)
            self._drop()
            self.outcome = Outcome.DROPPED
            return self.outcome
        if reaction is Reaction.GO_ON or not job.guarding.spoils_buffers(self._root):
            self._root.get_buffers(job.buffers.live())
        else:
            job.buffers.restore()
        if job.scaler is not None:
            job.scaler.unscale_(job.optimizer)
        if max_grad_norm is not None:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(job.params, max_grad_norm))
            job.guarding.judge_norm(self, self._root, self.grad_norm)
        check_fused(job.optimizer, "Job")  # again: a loaded state may have brought other options
        if job.scaler is not None:
            job.scaler.step(job.optimizer)
            job.scaler.update()
        else:
            job.optimizer.step()
        job.pool.give(self._root)
        self.outcome = Outcome.APPLIED
        job.advance(self)
        return self.outcome

    def adopt(self) -> None:
        """Be what the worker whose state was taken over has committed."""
        job = self.job
        self.outcome = Outcome.ADOPTED
        self.loss, self.grad_norm = job.loss, job.grad_norm
        sampler = job.schedule.sampler
        self.num_samples = sum(len(sampler.indices(self.number, slot)) for slot in range(job.num_slots))

    def _drop(self) -> None:
        self._partials.drop()
        self.job.buffers.restore()
        for param in self.job.params:
            param.grad = None
