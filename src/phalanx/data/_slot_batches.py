"""One iteration of an ElasticBatchSampler: batches step by step, for each slot that the worker carries.

Owns how far a loader has read. That never moves the sampler: only ``commit`` does. The one exception
is a loader that saves its own state (torchdata's StatefulDataLoader): loading that state means that what
the loader had delivered was used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.data._state import integer_of

if TYPE_CHECKING:
    from phalanx.data._batches import ElasticBatchSampler

#: How many indices are drawn at once.
_DRAW = 8192


class SlotBatches(Iterator[list[int]]):
    """The batches from the sampler's step to the end of that step's epoch."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        # Fixed here, not at the first batch: a worker whose slots get nothing in the last step of an
        # epoch may ask only after the commit, and must hear that the epoch is over.
        self._sampler = sampler
        self._slots = sampler.slots
        self._next = sampler.step, 0  # the step and the place among the slots of the next batch
        self._end = sampler.end_of_epoch(sampler.step)  # the step after the last
        self._undrawn = sampler.step  # the first step that is not in _ready
        self._ready: deque[tuple[int, int, list[int]]] = deque()
        self._begun = False

    def __next__(self) -> list[int]:
        if not self._begun:  # not in __init__: loaders make iterators that they never ask
            self._begun = True
            self._sampler.remind_of_commits()
        while not self._ready:
            if self._undrawn >= self._end or not self._slots:
                self._sampler.epoch_was_read()
                raise StopIteration
            self._draw()
        step, place, batch = self._ready.popleft()
        self._next = (step, place + 1) if place + 1 < len(self._slots) else (step + 1, 0)
        return batch

    def _draw(self) -> None:
        per_step = len(self._slots) * self._sampler.slot_batch_size
        stop = min(self._end, self._undrawn + max(1, _DRAW // per_step))
        wanted = [(step, place) for step in range(self._undrawn, stop) for place in range(len(self._slots))]
        wanted = [where for where in wanted if where >= self._next]
        batches = self._sampler.batches([(step, self._slots[place]) for step, place in wanted])
        self._ready.extend((*where, batch) for where, batch in zip(wanted, batches, strict=True) if batch)
        self._undrawn = stop

    def state_dict(self) -> dict[str, Any]:
        """What the loader has read; see ``load_state_dict``."""
        step, place = self._next
        step_size = self._sampler.num_slots * self._sampler.slot_batch_size
        slots = list(self._slots)
        return {"step": step, "place": place, "end": self._end, "slots": slots, "step_size": step_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after what was read when the state was saved, and count all steps before as committed.

        A worker that carries other slots now reads the step that was under way from its beginning.
        """
        step_size = self._sampler.num_slots * self._sampler.slot_batch_size
        if integer_of(state_dict, "step_size") != step_size:
            raise ValueError(
                f"the loader's state was saved with steps of {state_dict['step_size']} samples, but steps "
                f"have {step_size} now; load the state of the batch sampler itself to go on with other steps"
            )
        step, place, end = (integer_of(state_dict, name) for name in ("step", "place", "end"))
        if list(state_dict["slots"]) != list(self._sampler.slots):
            place = 0
        self._sampler.continue_at(step)
        self._slots, self._next, self._end, self._undrawn = self._sampler.slots, (step, place), end, step
        self._ready.clear()
