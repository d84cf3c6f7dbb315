"""ElasticBatchSampler: the samples of each (step, slot), and the one number that commits move.

Owns the next step to commit. Which samples a slot gets in a step is a pure function of the arguments
of the constructor (``_partition.Timeline``), never of what was iterated: a loader may read ahead, be
thrown away and be made anew, and gets the same batches for the same steps. How far a loader has read
(``SlotBatches``) never moves the sampler: only ``commit`` does. The one exception is a loader that saves
its own state (torchdata's StatefulDataLoader): loading that state means that what the loader had
delivered was used.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

from phalanx.data import _ranks
from phalanx.data._order import Order
from phalanx.data._padding import draw
from phalanx.data._partition import Timeline, checked_tail, slots_of
from phalanx.data._sampler_state import SamplerState, integer_of, parameters_of
from phalanx.data._source import Shuffle, adjust_cache, checked_seed, length_of, order_over
from phalanx.data._wrapped_orders import OrderLike
from phalanx.data.shards._mixed_order import MixedOrder
from phalanx.data.shards._shard_order import ShardOrder, ShardWindow

if TYPE_CHECKING:
    from phalanx.comm import Group

#: How many indices are drawn at once.
_DRAW = 8192


class ElasticBatchSampler(Sampler[list[int]]):
    """Batches for a fixed number of slots, whichever workers carry them.

    A step takes ``num_slots * slot_batch_size`` samples in a row of the epoch's order, each slot a
    contiguous part. Steps are numbered through all epochs. As ``batch_sampler`` of a loader it gives,
    step by step, a batch for each slot that this worker carries (``slots``; by default this rank's part
    of the current group), up to the end of the epoch. Only ``commit`` moves it on.

    >>> sampler = ElasticBatchSampler(range(8), num_slots=2, slot_batch_size=2, slots=[1], shuffle=False)
    >>> list(sampler), sampler.step
    ([[2, 3], [6, 7]], 0)
    >>> sampler.commit(0)
    >>> list(sampler)
    [[6, 7]]

    In a short last step with ``tail="uneven"`` slots share what is left; a slot that gets nothing has
    no batch in an iteration, and ``[]`` from ``indices``.
    """

    def __init__(
        self,
        dataset: Any,
        num_slots: int,
        slot_batch_size: int,
        *,
        slots: Iterable[int] | None = None,
        shuffle: Shuffle = True,
        seed: int | torch.Generator = 0,
        tail: str | None = None,
        order: OrderLike | None = None,
        block_size: int | None = None,
    ) -> None:
        if num_slots < 1 or slot_batch_size < 1:
            raise ValueError(
                f"num_slots is {num_slots} and slot_batch_size {slot_batch_size}; expected at least 1 each"
            )
        self.dataset = dataset
        self.num_slots = num_slots
        self.slot_batch_size = slot_batch_size
        self.seed = checked_seed(seed)
        self.tail = checked_tail(tail)
        self._dataset_length = length_of(dataset)
        self._order = order_over(dataset, shuffle, order, block_size).settle(num_slots, slot_batch_size)
        adjust_cache(dataset, self._order)
        self._timeline = Timeline(length=self._order.length, step_size=num_slots * slot_batch_size, tail=self.tail)
        self._step = 0
        self._watch_commits = True  # until the first commit, or until someone was reminded of it
        self._read_in_vain = False  # an epoch was read to its end, and nothing was ever committed
        self._slots: tuple[int, ...] = ()
        if slots is None:
            self.resize(*_ranks.place(None, None))
        else:
            self.carry(slots)

    @property
    def step(self) -> int:
        """The next step to train and commit."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._timeline.locate(self._step)[0]

    @property
    def steps_per_epoch(self) -> int:
        return self._timeline.steps_from(0)

    @property
    def order(self) -> Order:
        """Which sample stands at which position of an epoch."""
        return self._order

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that this worker carries."""
        return self._slots

    def end_of_epoch(self, step: int) -> int:
        """Return the first step of the epoch after that of ``step``."""
        return self._timeline.end_of_epoch(step)

    def indices(self, step: int, slot: int) -> list[int]:
        """Return the dataset indices of one slot in one step: a pure function, whoever asks and whenever."""
        return self.batches([(step, slot)])[0]

    def batches(self, wanted: Iterable[tuple[int, int]]) -> list[list[int]]:
        """``indices`` of many (step, slot) of one epoch at once, which is quicker."""
        epochs, ranges = set(), []
        for step, slot in wanted:
            if step < 0 or not 0 <= slot < self.num_slots:
                raise ValueError(f"step {step}, slot {slot}: expected a step >= 0 and a slot in [0, {self.num_slots})")
            epoch, position = self._timeline.locate(step)
            epochs.add(epoch)
            ranges.append(self._timeline.slot_range(position, slot, self.num_slots))
        if len(epochs) > 1:
            raise ValueError(f"steps of epochs {sorted(epochs)} asked for at once; expected one epoch")
        if not ranges:
            return []
        positions = np.concatenate([np.arange(first, stop, dtype=np.int64) for first, stop in ranges])
        drawn = iter(draw(self._order, self.seed, epochs.pop(), positions, self.tail))
        return [[next(drawn) for _ in range(stop - first)] for first, stop in ranges]

    def windows(self, step: int, slot: int) -> list[ShardWindow]:
        """Return the windows of shards that a slot reads from in a step; none under orders that have no windows."""
        order = self._order
        if not isinstance(order, (ShardOrder, MixedOrder)):
            return []
        epoch, position = self._timeline.locate(step)
        positions = np.arange(*self._timeline.slot_range(position, slot, self.num_slots), dtype=np.int64)
        return order.windows_at(self.seed, epoch, positions % order.length)

    def commit(self, step: int) -> None:
        """Say that ``step`` was trained: its samples are used and never issued again.

        Steps are committed one after the other; a step that was aborted is simply not committed.
        """
        if step != self._step:
            raise ValueError(
                f"commit of step {step}, but the next step to commit is {self._step}; every step is "
                "committed once, in order"
            )
        self._step += 1
        self._watch_commits = self._read_in_vain = False

    def continue_at(self, step: int) -> None:
        """Count all steps before ``step`` as committed."""
        self._timeline.locate(step)  # refuses a step that this run does not know
        self._step = step

    def carry(self, slots: Iterable[int]) -> None:
        """Carry these slots from the next iteration on."""
        carried = tuple(slots)
        outside = [slot for slot in carried if not 0 <= slot < self.num_slots]
        if outside or len(set(carried)) != len(carried):
            raise ValueError(f"slots are {carried}; expected different ones, each in [0, {self.num_slots})")
        self._slots = carried

    def resize(self, num_replicas: int, rank: int) -> None:
        """Carry the contiguous part of the slots that falls to ``rank`` of ``num_replicas`` workers."""
        self.carry(slots_of(rank, num_replicas, self.num_slots))

    def __iter__(self) -> Iterator[list[int]]:
        return SlotBatches(self)

    def __len__(self) -> int:
        """Return how many batches an iteration that begins now gives this worker."""
        end = self.end_of_epoch(self._step)
        count = (end - self._step) * len(self._slots)
        if self.tail != "uneven":
            return count
        _, position = self._timeline.locate(end - 1)
        ranges = (self._timeline.slot_range(position, slot, self.num_slots) for slot in self._slots)
        return count - sum(first == stop for first, stop in ranges)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: what is committed, and nothing else. JSON-able, the same on all ranks."""
        epoch, position = self._timeline.locate(self._step)
        state = SamplerState(
            seed=self.seed,
            epoch=epoch,
            position=position,
            length=self._dataset_length,
            order=self._order.name,
            parameters=self._order.parameters(),
        )
        return {**state.to_dict(), "step": self._step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after the last committed step of ``state_dict``; iterators made before go on as they were.

        Another number of slots or another batch size is allowed: the epoch goes on at the same position
        with steps of the new size.
        """
        order = self._order.adopt(parameters_of(state_dict))
        length = order.length
        state = SamplerState.checked(state_dict, length=self._dataset_length, order=order.name, last=length)
        step = integer_of(state_dict, "step")
        if step < 0:
            raise ValueError(f"sampler state has step {step}; expected 0 or more")
        timeline = Timeline(length=length, step_size=self._timeline.step_size, tail=self.tail)
        if timeline.locate(step) != (state.epoch, state.position):  # saved with another step size
            timeline = Timeline(
                length=length,
                step_size=timeline.step_size,
                tail=self.tail,
                first_step=step,
                first_epoch=state.epoch,
                first_position=state.position,
            )
        self._order, self._timeline, self.seed, self._step = order, timeline, state.seed, step
        adjust_cache(self.dataset, order)
        self._watch_commits, self._read_in_vain = step == 0, False  # who saved a later step does commit

    def epoch_was_read(self) -> None:
        """Take note that an iteration has come to the end of the epoch."""
        self._read_in_vain = self._watch_commits and bool(self._slots)

    def remind_of_commits(self) -> None:
        """Warn, once, someone who iterates again but has never committed: it would go on forever."""
        if self._read_in_vain:
            self._watch_commits = self._read_in_vain = False
            warnings.warn(
                f"step {self._step} is issued again: an epoch was read to its end and no step has ever been "
                "committed. Call commit(step) after each step that was trained",
                stacklevel=4,
            )

    def check_agreement(self, group: Group | None = None) -> None:
        """Make sure that all ranks agree on seed, epoch, step and layout; collective over the group.

        Raises ``SamplerMismatch`` on every rank, naming who differs in what.
        """
        layout = {"num_slots": self.num_slots, "slot_batch_size": self.slot_batch_size, "tail": self.tail}
        _ranks.check_agreement({**self.state_dict(), **layout}, self._slots, self.num_slots, group)


class SlotBatches(Iterator[list[int]]):
    """Gives the batches from the sampler's step to the end of that step's epoch."""

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
        """Return what the loader has read; see ``load_state_dict``."""
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
