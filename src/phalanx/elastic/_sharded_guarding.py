"""The guard of a sharded job: each worker looks at the cells that it holds, and all hear what any of them found.

Decisions are those of ``_guard``, from facts that are alike on all workers: the step's numbers, and what all heard at
the commit point. So all of them stop, compute again, or leave the update out. Who has to follow a worker that is ahead
after a loss hears of its decision with the verdict, and does the same without asking anybody: a save that the job went
back to is read from the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.elastic._guard import BAD_GRADIENT, LossSpike
from phalanx.elastic._guard_record import after_rollback, after_skip
from phalanx.elastic._guarding import Guarding, ReducedStep, is_finite, nonfinite_names
from phalanx.elastic.membership._lost import LOST
from phalanx.elastic.reduce._flat_layout import Flat

if TYPE_CHECKING:
    from phalanx.elastic._guard import Guard
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step
    from phalanx.elastic.sharded._sharding import JobSharding
    from phalanx.elastic.sharded._verdict import StepVerdict


@dataclass(frozen=True)
class Findings:
    """A reduced step as the guard looks at it."""

    notes: Tensor
    buffers: Sequence[Tensor]
    bad_grads: tuple[str, ...]

    def read_buffers(self, like: Any) -> Sequence[Tensor]:
        return self.buffers


class ShardedGuarding(Guarding):
    """Looks at a sharded job."""

    def __init__(self, job: Job, guard: Guard, sharding: JobSharding, *, has_saves: bool) -> None:
        super().__init__(job, guard, has_saves=has_saves)
        self._sharding = sharding
        self._is_looking = self._is_bad = False
        """Whether a gradient of the slot that is computed is not finite."""
        self.verdict: StepVerdict | None = None
        """Of the step that is judged."""
        self.back_to: int | None = None
        """Where the last way back led."""

    def begin_step(self) -> None:
        if self._is_looking:
            self._is_looking = False
            for _, reduction in self._sharding.reductions():
                reduction.look = None
        super().begin_step()

    def _install_trace(self) -> None:
        """Have a slot's gradients looked at where they pass by: nobody has them all at the parameters.

        Not in tensor parallel jobs, where workers compute a slot together: each has other parts of its values, and what
        one finds the others would not look for.
        """
        if self._sharding.tensor_groups is not None:
            return
        self._is_looking = True
        self._trace.install(with_grads=False)
        for names, reduction in self._sharding.reductions():
            reduction.look = partial(self._look, names)

    def _look(self, names: Sequence[str], index: int, grad: Tensor) -> None:
        if not is_finite(grad):
            self._is_bad = True
            self._trace.note_gradient(names[index])

    def take_note(self) -> int:
        """Return what to note of the slot that is done, when the step is computed again. The next slot begins."""
        is_bad, self._is_bad = self._is_bad, False
        return self._trace.take_code() | (BAD_GRADIENT if is_bad else 0)

    def holds_finite(self) -> bool:
        """Return whether the reduced gradient of all that this worker holds is finite."""
        return all(is_finite(held.grad) for held in self._sharding.store.sections.values())

    def bad_grads(self) -> tuple[str, ...]:
        """Return the parameters whose reduced gradient is not finite, on any worker; all workers call it."""
        sharding = self._sharding
        grads = ((sharding.name_of(piece.key), piece.grad) for piece in sharding.store.pieces)
        return self._told_by_all(nonfinite_names(grads))

    def check_state(self) -> None:
        """Raise on all workers if any of them has a state that should not be kept; all call it, also who is new."""
        if self._meant is None and self.guard.nonfinite != "ignore":
            self._meant = frozenset(self._nonfinite_tensors())  # it has changed nothing yet
        super().check_state()

    def nonfinite_state(self) -> tuple[str, ...]:
        mine = super().nonfinite_state()
        try:
            return self._told_by_all(mine)
        except LOST as error:
            self._sharding.passes.lost = error  # the next step finds out; a state is not kept without its peers
            return ()

    def _told_by_all(self, names: tuple[str, ...]) -> tuple[str, ...]:
        told = self._sharding.everyone.all_gather_values(list(names))
        return tuple(dict.fromkeys(name for each in told for name in each))

    @property
    def wants_norm(self) -> bool:
        """Return whether the norm of each gradient is looked at."""
        return self.guard.spike is not None

    def _grad_norm(self, step: Step) -> float | None:
        assert self.verdict is not None, "the step has passed the commit point"
        return self.verdict.norm

    def follow(self, step: Step, verdict: StepVerdict) -> None:
        """Remember a step that another worker has committed with this verdict, and leave it out if that one did."""
        if verdict.back_to is not None:
            self.record = after_rollback(self.record, self._sharding.go_back(verdict.back_to), step.number)
        elif verdict.is_skipped:
            self.record = after_skip(self.record, step.number)
        else:
            self._norm = verdict.norm if self.wants_norm else None
            self.applied(step)

    def _go_back(self, step: Step) -> int:
        """Become what the last good save is, each worker its cells; its step. Raises as collectives do."""
        job, group = self._job, self._sharding.everyone
        job.saving.settle()  # what was submitted counts; the first worker has then made the save of all files
        to = int(group.all_gather_values(job.saving.good_step(before=step.number))[0])
        if to < 0:
            why = f"step {step.number} spiked: {self._why}; there is no save to go back to yet. Save more often"
            raise LossSpike(why, step=step.number)
        self.record = after_rollback(self.record, self._sharding.go_back(to), step.number)
        self.back_to = to
        return to

    def _nonfinite_grads(self, root: Flat | ReducedStep) -> tuple[str, ...]:
        assert isinstance(root, Findings), "a sharded step's"
        return root.bad_grads

    def _workers_of_slots(self) -> dict[int, str]:
        workers, waves = self._sharding.workers, self._sharding.waves
        return {slot: workers[rank] for slot, rank in enumerate(waves.owners)}

    def _nonfinite_tensors(self) -> tuple[str, ...]:
        return nonfinite_names(self._named_tensors())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        sharding = self._sharding
        yield from self._job.model.named_buffers()
        for piece in sharding.store.pieces:
            name = sharding.name_of(piece.key)
            yield name, piece.tensor
            for key, value in self._job.optimizer.state.get(piece.tensor, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer's {key} of {name}", value
