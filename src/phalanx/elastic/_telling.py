"""Tells of each committed step, from the first worker: a line for people, an event, a save when one is due.

Owns who tells. That is the worker of rank 0 after the commit; when it is lost before it has, the worker that comes to
be the first tells instead. A step may so be told twice, never not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.events._event_types import StepCommitted

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic._step import Step


class Telling:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._untold: Step | None = None
        """The last step, when telling of it was another worker's business."""

    def tell(self, step: Step) -> None:
        """Tell that a step is part of this worker's state."""
        job = self._job
        is_due = job.saving.is_due(job.step)
        if is_due:
            job.guarding.check_state()  # on all workers, so that all stop
        if job.rank != 0:
            self._untold = step
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
        if is_due:
            job.saving.submit(job.step, job.state_dict())

    def tell_again(self) -> None:
        """After a loss: the first worker may have died before it told of the last step."""
        if self._untold is not None and self._job.rank == 0:
            self.tell(self._untold)
