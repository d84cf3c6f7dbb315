"""Tells of each committed step, from the first worker: a line for people, an event, a save when one is due.

Owns who tells. That is the worker of rank 0 after the commit; when it is lost before it has, the worker that comes to
be the first tells instead. A step may so be told twice, never not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.elastic.tools._step_clock import COMPUTE, SAVE
from phalanx.events._event_types import SaveFailed, StepCommitted
from phalanx.events._troubles import say

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step


class Telling:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._untold: Step | None = None
        """The last step, when telling of it was another worker's business."""
        self._saves_asked: int | None = None
        """Of the requests for a save, how many this worker knows to be dealt with."""

    def tell(self, step: Step, *, is_again: bool = False) -> None:
        """Tell that a step is part of this worker's state."""
        job = self._job
        together = job.sharding is not None  # all workers save, at the step itself or not at all
        is_due = job.saving.is_due(job.step) and not (together and is_again)
        is_asked = self._is_asked() if job.sharding is None else job.sharding.take_save_request() and not is_again
        if is_due:
            job.guarding.check_state()  # on all workers, so that all stop
        if is_due and together:
            job.submit_save()
        elif is_asked and together:
            self._save_as_asked()
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "epoch": step.epoch, "workers": job.world_size}
        if job.rank != 0:
            self._untold = step
            job.tracking.close()  # another worker is the first, and logs
            job.tracking.keep(step.number, values)
            return
        self._untold = None
        event = StepCommitted(
            step=step.number,
            epoch=step.epoch,
            loss=step.loss,
            samples=step.num_samples,
            generation=job.generation,
            round=job.regrouping.membership.round,
            world_size=job.world_size,
        )
        job.progress.show(event, job.troubles.status)
        job.events.write(event)
        job.tracking.tell(step.number, values)
        if is_due and not together:
            job.clock.lap(COMPUTE)
            job.submit_save()
            job.clock.lap(SAVE)
        elif is_asked and not is_due and not together:
            self._save_as_asked()

    def _is_asked(self) -> bool:
        """Return whether somebody has asked for a save since the last step; each request counts once, on all workers
        alike, so that a worker that comes to be the first does not answer it again."""
        signals = self._job.regrouping.coordinator.signals
        before, self._saves_asked = self._saves_asked, max(self._saves_asked or 0, signals.saves_asked)
        if before is None:  # of a worker that came later, the earlier requests are others' business
            before = 0 if self._job.generation == 0 else self._saves_asked
        return self._saves_asked > before

    def _save_as_asked(self) -> None:
        """Save because somebody asked for it; a job that cannot says so and goes on."""
        job = self._job
        problem = "" if job.saving.options else "the job has nowhere to save to (Job(saves=Saves(directory=...)))"
        if not problem and job.guarding.is_on and (bad := job.guarding.nonfinite_state()):
            problem = f"the state is not finite: {', '.join(bad)}"
        if problem and job.rank != 0:
            return  # the workers of a sharded job save together; one of them tells
        if problem:
            job.events.write(SaveFailed(step=job.step, error=problem, next_attempt_in=0.0))
            say(f"a save was asked for, but {problem}")
            return
        job.clock.lap(COMPUTE)
        job.submit_save()
        job.clock.lap(SAVE)

    def tell_again(self) -> None:
        """After a loss: the first worker may have died before it told of the last step."""
        if self._untold is not None and self._job.rank == 0:
            self.tell(self._untold, is_again=True)
