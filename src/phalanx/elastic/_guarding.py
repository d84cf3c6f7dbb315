"""Carries out what ``_guard`` decides: looks at each reduced step before its update, at each state before it is kept.

Owns two things that must be remembered: which tensors were not finite when the job began (masks of -inf are meant to
be), and the step that is computed again because its gradient was not finite. Every worker of a round finds the
same facts in the same bits, so all of them stop, or compute again, alike; nothing is asked of the others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from phalanx.elastic._first_nonfinite import FirstNonFinite
from phalanx.elastic._guard import (
    AT_FAULT,
    BAD_GRADIENT,
    INF_LOSS,
    NAN_LOSS,
    Guard,
    LossSpike,
    NonFinite,
    Reaction,
    SlotReport,
    StepFacts,
    decide,
    explain,
    explain_spike,
    explain_state,
    what_is_wrong,
)
from phalanx.elastic._guard_record import GuardRecord, after_skip, after_update, find_spike
from phalanx.elastic._rollback import roll_back
from phalanx.elastic.reduce._flat_layout import Flat
from phalanx.elastic.reduce._norm_blocks import total_norm
from phalanx.events._event_types import NonFiniteFound, RolledBack, StepSkipped

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step


class ReducedStep(Protocol):
    """A reduced step, as far as any guard looks at it; ``Flat`` is one."""

    @property
    def notes(self) -> Tensor: ...

    def read_buffers(self, like: Sequence[Tensor]) -> Sequence[Tensor]: ...


class Guarding:
    def __init__(self, job: Job, guard: Guard, *, has_saves: bool) -> None:
        if guard.spike is not None and guard.on_spike == "rollback" and not has_saves:
            raise ValueError("on_spike is 'rollback', but the job has no saves; expected Job(saves=Saves(...)) as well")
        self.guard = guard
        self.record = GuardRecord()
        self._trace = FirstNonFinite(job.model, is_finite)
        self._why = ""
        self._job = job
        self._meant: frozenset[str] | None = None
        """What was not finite when this worker began."""
        self._suspect: tuple[int, int, int] | None = None
        """Step, generation and round of the attempt whose gradient was not finite."""
        self._norm: float | None = None
        """The norm of the step's gradient, where spikes are looked for."""
        self._found = StepFacts(loss=None)
        """What was found in the step that was judged last."""

    @property
    def is_on(self) -> bool:
        return self.guard.nonfinite != "ignore" or self.guard.spike is not None

    @property
    def clean_since(self) -> int | None:
        """Return since which step nothing was wrong, if anybody looks."""
        return self.record.clean_since if self.is_on else None

    # -- while slots are computed -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        if self._meant is None:
            self._meant = frozenset(self._nonfinite_tensors() if self.is_on else ())
        if self._suspect is not None and self._suspect[0] != self._job.step:
            self._suspect = None
        self._trace.remove()
        if self._suspect is not None:
            self._install_trace()

    def _install_trace(self) -> None:
        self._trace.install()

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
        """Return what to note of a slot's gradient, and where it ceased to be finite; looked at only when the step is
        computed again for it."""
        if not self.is_again:
            return 0
        is_bad = not all(grad is None or is_finite(grad) for grad in grads)
        return self._trace.take_code() | (BAD_GRADIENT if is_bad else 0)

    # -- before the update ------------------------------------------------------------------------------------

    def judge(self, step: Step, root: Flat | ReducedStep) -> Reaction:
        """Decide about a reduced step, and remember or raise what follows from it."""
        if not self.is_on:
            return Reaction.GO_ON
        self._trace.remove()
        facts = self._found = self._facts(step, root)
        reaction = decide(self.guard, facts)
        self._why = facts.spike or what_is_wrong(facts)
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

    def spoils_buffers(self, root: Flat | ReducedStep) -> bool:
        """Return whether taking the buffers of a step would make some of them non-finite."""
        return bool(self._nonfinite_buffers(root))

    def judge_norm(self, step: Step, root: Flat | ReducedStep, norm: float) -> Reaction:
        """After clipping: finite gradients may have a norm that is not, and would then all become 0."""
        if self._scale() is not None or math.isfinite(norm):
            return Reaction.GO_ON
        skips = self.record.skips_in_row
        facts = self._found = StepFacts(loss=step.loss, grad_norm=norm, is_again=step.is_again, skips_in_row=skips)
        reaction = decide(self.guard, facts)
        self._why = what_is_wrong(facts)
        if reaction is Reaction.STOP:
            self._stop(step, root, facts)
        return reaction

    def applied(self, step: Step) -> None:
        """Remember a step that was applied."""
        norm, self._norm = self._norm, None
        window = self.guard.window if self.guard.spike is not None else 0
        self.record = after_update(self.record, step.number, step.loss, norm, window)

    def leave_out(self, step: Step, reaction: Reaction) -> None:
        """Write down that a step is committed without its update, after the way back to a save if that is the reaction.

        Raises as collectives do, before anything has changed here.
        """
        job, first, self._norm = self._job, step.number, None
        if reaction is Reaction.ROLL_BACK:
            first = self._go_back(step)
            job.events.write(RolledBack(step=step.number, to=first, reason=self._why))
        else:
            self.record = after_skip(self.record, step.number)
            in_row = self.record.skips_in_row
            job.events.write(StepSkipped(step=step.number, epoch=step.epoch, reason=self._why, in_row=in_row))
        job.audit.skipped(job.lineage, step.number, first, self._why)

    def _go_back(self, step: Step) -> int:
        """Become what the last good save is; its step."""
        return roll_back(self._job, step.number, self._why)

    def _facts(self, step: Step, root: Flat | ReducedStep) -> StepFacts:
        grads = () if step.is_known_finite else self._nonfinite_grads(root)
        return StepFacts(
            loss=step.loss,
            grads=grads,
            buffers=self._nonfinite_buffers(root),
            is_again=step.is_again,
            scale=self._scale(),
            spike=self._spike(step) if not grads else "",
            skips_in_row=self.record.skips_in_row,
            rollbacks=self.record.rollbacks,
        )

    def _spike(self, step: Step) -> str:
        """Return what of the step is out of all proportion, if the guard wants to know."""
        if self.guard.spike is None:
            return ""
        self._norm = self._grad_norm(step)
        return find_spike(self.record, self.guard.spike, step.loss, self._norm)

    def _grad_norm(self, step: Step) -> float | None:
        params = self._job.params
        norm = total_norm([param.grad for param in params], [param.numel() for param in params])
        return norm / ((None if step.is_unscaled else self._scale()) or 1.0)

    def _nonfinite_grads(self, root: Flat | ReducedStep) -> tuple[str, ...]:
        assert isinstance(root, Flat), "that of whole replicas"
        job = self._job
        names = dict(zip(job.param_names, job.params, strict=True))
        replaced = [
            p.grad for p, view in zip(job.params, root.grads, strict=True) if p.grad is not None and p.grad is not view
        ]
        if all(map(is_finite, [*root.summed_grads(), *replaced])):
            return ()
        return nonfinite_names((name, p.grad) for name, p in names.items() if p.grad is not None)

    def _nonfinite_buffers(self, root: Flat | ReducedStep) -> tuple[str, ...]:
        values = zip(self._job.buffers.names, root.read_buffers(self._job.buffers.live()), strict=True)
        looked_at = {name: value for name, value in values if name not in (self._meant or ())}
        return () if are_finite(looked_at.values()) else nonfinite_names(looked_at.items())

    def _scale(self) -> float | None:
        scaler = self._job.scaler
        return None if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())

    def _stop(self, step: Step, root: Flat | ReducedStep, facts: StepFacts) -> None:
        job = self._job
        if facts.spike:
            job.buffers.restore()
            self._finish_save()
            raise LossSpike(explain_spike(self.guard, step.number, step.epoch, facts), step=step.number)
        error = self.error_of(step, root, Reaction.STOP)
        self._finish_save()
        raise error

    def error_of(self, step: Step, root: Flat | ReducedStep, reaction: Reaction = Reaction.RAISE) -> NonFinite:
        """Return the error for the step that was judged last, and write down what it says."""
        job, facts = self._job, self._found
        job.buffers.restore()  # those of the step's beginning: the message says what was wrong before it
        reports = self._reports(step, root, facts)
        message = explain(step.number, step.epoch, facts, reports, self.nonfinite_state())
        slots = {report.slot: report.samples for report in reports}
        job.events.write(
            NonFiniteFound(
                step=step.number,
                epoch=step.epoch,
                reaction=reaction.value,
                loss=None if step.loss is None else str(step.loss),
                grads=facts.grads,
                buffers=facts.buffers,
                slots={str(slot): samples for slot, samples in slots.items()},
            )
        )
        return NonFinite(message, step=step.number, slots=slots)

    def _reports(self, step: Step, root: Flat | ReducedStep, facts: StepFacts) -> list[SlotReport]:
        job = self._job
        notes = {slot: int(note) for slot, note in enumerate(root.notes.tolist()) if int(note) & AT_FAULT}
        if facts.buffers:
            notes.setdefault(0, 0)
        workers = self._workers_of_slots()
        sampler = job.schedule.sampler
        return [
            SlotReport(slot, workers[slot], tuple(sampler.indices(step.number, slot)), note, self._trace.name(note))
            for slot, note in notes.items()
        ]

    def _workers_of_slots(self) -> dict[int, str]:
        ranges = self._job.regrouping.reduction.ranges
        workers = self._job.regrouping.membership.workers
        return {slot: worker for worker, slots in zip(workers, ranges, strict=True) for slot in slots}

    # -- before a state is kept -------------------------------------------------------------------------------

    def nonfinite_state(self) -> tuple[str, ...]:
        """Return what in the job's state is not finite and was when the job began."""
        return tuple(name for name in self._nonfinite_tensors() if name not in (self._meant or ()))

    def _nonfinite_tensors(self) -> tuple[str, ...]:
        return nonfinite_names(named_state(self._job.model, self._job.optimizer))

    def check_state(self) -> None:
        """Raise if the state should not be kept: a finite gradient can still make an update that overflows."""
        if self.guard.nonfinite == "ignore" or self._meant is None:  # no step was begun here: nothing has changed
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


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of many small tensors of one device are finite; they are looked at together.

    >>> are_finite([torch.ones(2), torch.tensor(3)]), are_finite([torch.ones(2), torch.tensor(float("nan"))])
    (True, False)
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    return all(is_finite(torch.cat(alike)) for alike in by_dtype.values())


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
