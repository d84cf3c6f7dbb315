"""Carries out what ``_guard`` decides: looks at each reduced step before its update, at each state before it is kept.

Owns two things that must be remembered: which tensors were not finite when the job began (masks of -inf are meant to
be), and the step that is computed again because its gradient was not finite. Every worker of a round finds the
same facts in the same bits, so all of them stop, or compute again, alike; nothing is asked of the others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx.elastic._guard import (
    BAD_GRADIENT,
    INF_LOSS,
    NAN_LOSS,
    Guard,
    NonFinite,
    Reaction,
    SlotReport,
    StepFacts,
    decide,
    explain,
    explain_state,
)
from phalanx.elastic.reduce._flat_layout import Flat
from phalanx.elastic.reduce._slots import slot_range
from phalanx.events._event_types import NonFiniteFound

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step


class Guarding:
    def __init__(self, job: Job, guard: Guard) -> None:
        self.guard = guard
        self._job = job
        self._meant: frozenset[str] | None = None
        """What was not finite when this worker began."""
        self._suspect: tuple[int, int, int] | None = None
        """Step, generation and round of the attempt whose gradient was not finite."""

    @property
    def is_on(self) -> bool:
        return self.guard.nonfinite != "ignore"

    # -- while slots are computed -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self._meant is None:
            found = nonfinite_names(named_state(self._job.model, self._job.optimizer)) if self.is_on else ()
            self._meant = frozenset(found)
        if self._suspect is not None and self._suspect[0] != self._job.step:
            self._suspect = None

    @property
    def is_again(self) -> bool:
        """Return whether the current step was found wanting before and is computed again."""
        return self._suspect is not None

    @property
    def attempt(self) -> list[int]:
        """Return what tells a second attempt in the same round from the first."""
        membership = self._job.regrouping.membership
        return (
            [1] if self._suspect is not None and self._suspect[1:] == (membership.generation, membership.round) else []
        )

    def note_loss(self, loss: float) -> int:
        """Return what to note of a slot's loss."""
        return 0 if math.isfinite(loss) else NAN_LOSS if math.isnan(loss) else INF_LOSS

    def note_grads(self, grads: list[Tensor | None]) -> int:
        """Return what to note of a slot's gradient; looked at only when the step is computed again for it."""
        if not self.is_again or all(grad is None or is_finite(grad) for grad in grads):
            return 0
        return BAD_GRADIENT

    # -- before the update ------------------------------------------------------------------------------------

    def judge(self, step: Step, root: Flat) -> Reaction:
        """Decide about a reduced step, and remember or raise what follows from it."""
        if not self.is_on:
            return Reaction.GO_ON
        facts = self._facts(step, root)
        reaction = decide(self.guard, facts)
        if reaction is Reaction.STOP:
            self._stop(step, root, facts)
        if reaction is Reaction.COMPUTE_AGAIN:
            membership = self._job.regrouping.membership
            self._suspect = (step.number, membership.generation, membership.round)
            found = NonFiniteFound(step=step.number, reaction=reaction.value, grads=facts.grads)
            self._job.events.write(found)
        elif reaction is Reaction.GO_ON and facts.is_again:
            warnings.warn(
                f"the gradient of step {step.number} was not finite and is when computed again: the computation is "
                "not deterministic, or a machine is at fault. The second result counts",
                RuntimeWarning,
                stacklevel=3,
            )
        return reaction

    def spoils_buffers(self, root: Flat) -> bool:
        """Return whether taking the buffers of a step would make some of them non-finite."""
        return bool(self._nonfinite_buffers(root))

    def judge_norm(self, step: Step, root: Flat, norm: float) -> None:
        """After clipping: finite gradients may have a norm that is not, and would then all become 0."""
        if self._scale() is None and not math.isfinite(norm):
            facts = StepFacts(loss=step.loss, grad_norm=norm, is_again=step.is_again)
            if decide(self.guard, facts) is Reaction.STOP:
                self._stop(step, root, facts)

    def _facts(self, step: Step, root: Flat) -> StepFacts:
        job = self._job
        names = dict(zip(job.param_names, job.params, strict=True))
        replaced = [
            p.grad for p, view in zip(job.params, root.grads, strict=True) if p.grad is not None and p.grad is not view
        ]
        grads: tuple[str, ...] = ()
        if not all(map(is_finite, [*root.summed_grads(), *replaced])):
            grads = nonfinite_names((name, p.grad) for name, p in names.items() if p.grad is not None)
        return StepFacts(
            loss=step.loss,
            grads=grads,
            buffers=self._nonfinite_buffers(root),
            is_again=step.is_again,
            scale=self._scale(),
        )

    def _nonfinite_buffers(self, root: Flat) -> tuple[str, ...]:
        buffers = zip(self._job.buffers.names, root.read_buffers(self._job.buffers.live()), strict=True)
        return tuple(name for name in nonfinite_names(buffers) if name not in (self._meant or ()))

    def _scale(self) -> float | None:
        scaler = self._job.scaler
        return None if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())

    def _stop(self, step: Step, root: Flat, facts: StepFacts) -> None:
        job = self._job
        reports = self._reports(step, root, facts)
        job.buffers.restore()
        message = explain(step.number, step.epoch, facts, reports, self.nonfinite_state())
        slots = {report.slot: report.samples for report in reports}
        job.events.write(
            NonFiniteFound(
                step=step.number,
                epoch=step.epoch,
                reaction=Reaction.STOP.value,
                loss=None if step.loss is None else str(step.loss),
                grads=facts.grads,
                buffers=facts.buffers,
                slots={str(slot): samples for slot, samples in slots.items()},
            )
        )
        self._finish_save()
        raise NonFinite(message, step=step.number, slots=slots)

    def _reports(self, step: Step, root: Flat, facts: StepFacts) -> list[SlotReport]:
        job = self._job
        notes = {slot: int(note) for slot, note in enumerate(root.notes.tolist()) if note}
        if facts.buffers:
            notes.setdefault(0, 0)
        membership = job.regrouping.membership
        workers = {
            slot: worker
            for rank, worker in enumerate(membership.workers)
            for slot in slot_range(job.num_slots, len(membership.workers), rank)
        }
        sampler = job.schedule.sampler
        return [
            SlotReport(slot, workers[slot], tuple(sampler.indices(step.number, slot)), note)
            for slot, note in notes.items()
        ]

    # -- before a state is kept -------------------------------------------------------------------------------

    def nonfinite_state(self) -> tuple[str, ...]:
        """Return what in the job's state is not finite and was when the job began."""
        found = nonfinite_names(named_state(self._job.model, self._job.optimizer))
        return tuple(name for name in found if name not in (self._meant or ()))

    def check_state(self) -> None:
        """Raise if the state should not be kept: a finite gradient can still make an update that overflows."""
        if not self.is_on or self._meant is None:  # no step was begun here: nothing has changed
            return
        names = self.nonfinite_state()
        if names:
            step = self._job.step
            found = NonFiniteFound(step=step - 1, reaction=Reaction.STOP.value, state=names)
            self._job.events.write(found)
            self._finish_save()
            raise NonFinite(explain_state(step, names), step=step - 1)

    def _finish_save(self) -> None:
        """What was good is on the disk before this process may be ended; a disk's trouble is not why the job stops."""
        with suppress(OSError):
            self._job.saving.wait_idle()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; integers always are.

    The sum of finite values is finite, unless it overflows: only then every value is looked at.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("inf")]))
    (True, False)
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    tensor = tensor.detach()
    wide = torch.float32 if tensor.dtype.itemsize < 4 else None
    return bool(torch.isfinite(tensor.sum(dtype=wide)).item()) or bool(torch.isfinite(tensor).all().item())


def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Return the names of those that are not finite."""
    return tuple(name for name, tensor in named if not is_finite(tensor))


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Return every tensor of a model and its optimizer, with a name that a person can look up."""
    names = {id(param): name for name, param in model.named_parameters()}
    yield from model.named_parameters()
    yield from model.named_buffers()
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"optimizer's {key} of {names.get(id(param), 'a parameter')}", value
