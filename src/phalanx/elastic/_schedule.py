"""Where the job is in its data: epoch, step of the epoch, step of the job; moved by commits only.

Owns the position. Which samples a (step, slot) has is ``ElasticBatchSampler``'s business; this asks it, for any step
of any epoch, and tells what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ._loading import Ticket, split


class BatchPlan(Protocol):
    """What is needed of a sampler: a pure function from (epoch, step of the epoch, slot) to indices."""

    num_samples: int
    """Distinct samples that an epoch commits."""
    steps_per_epoch: int

    def indices(self, epoch: int, step: int, slot: int) -> list[int]: ...


class Schedule:
    def __init__(self, plan: BatchPlan, num_slots: int, num_parts: int) -> None:
        self.plan = plan
        self.num_slots = num_slots
        self.num_parts = num_parts
        self.step = 0

    @property
    def epoch(self) -> int:
        return self.step // self.plan.steps_per_epoch

    def advance(self) -> None:
        """The current step is committed."""
        self.step += 1

    def tickets(self, step: int, slot: int) -> list[Ticket]:
        """The parts of a slot's batch; none if the epoch's last step has no sample left for it."""
        epoch, within = divmod(step, self.plan.steps_per_epoch)
        indices = self.plan.indices(epoch, within, slot)
        return [Ticket(epoch, step, slot, i, part) for i, part in enumerate(split(indices, self.num_parts))]

    def ahead(self, slots: range, last_step: int) -> Iterator[Ticket]:
        """All tickets of some slots from the current step on, in the order in which they will be computed."""
        for step in range(self.step, last_step):
            for slot in slots:
                yield from self.tickets(step, slot)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "steps_per_epoch": self.plan.steps_per_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["steps_per_epoch"] != self.plan.steps_per_epoch:
            raise ValueError(
                f"the state is of a job with {state['steps_per_epoch']} steps per epoch, this one has "
                f"{self.plan.steps_per_epoch}: dataset length, num_slots, slot_batch_size and tail must be the same"
            )
        self.step = state["step"]
