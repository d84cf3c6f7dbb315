"""Where the job is in its data; moved by commits only.

Owns nothing but the conversation with ``ElasticBatchSampler``, which says which samples a (step, slot) has: it turns
them into tickets, for the current step and for reading ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.data import ElasticBatchSampler
from phalanx.elastic._loading import Ticket, split


class Schedule:
    def __init__(self, sampler: ElasticBatchSampler, num_parts: int) -> None:
        self.sampler = sampler
        self.num_parts = num_parts

    @property
    def step(self) -> int:
        """The next step to commit; all before it are committed."""
        return self.sampler.step

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def num_samples_per_epoch(self) -> int:
        """Samples that a whole epoch commits; distinct ones, unless the order repeats some."""
        whole = self.sampler.steps_per_epoch * self.sampler.num_slots * self.sampler.slot_batch_size
        return min(whole, self.sampler.order.length)

    def tickets(self, step: int, slot: int) -> list[Ticket]:
        """The parts of a slot's batch; none if the epoch's last step has no sample left for it."""
        parts = split(self.sampler.indices(step, slot), self.num_parts)
        return [Ticket(step, slot, i, part) for i, part in enumerate(parts)]

    def ahead(self, slots: range) -> Iterator[Ticket]:
        """All tickets of some slots up to the end of the epoch, in the order in which they will be computed."""
        for step in range(self.step, self.sampler.end_of_epoch(self.step)):
            for slot in slots:
                yield from self.tickets(step, slot)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)
