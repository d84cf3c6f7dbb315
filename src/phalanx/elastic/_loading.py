"""Fetches the samples of one (step, slot): in this process or by loader processes, with the same bits either way.

Whoever fetches seeds the random generators from (seed, step, slot, part) first, so augmentation does not depend on
the process that does it. Nothing counts as consumed here: only a commit moves the position. How loader processes live
is ``_loader_processes``' matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, default_collate

from phalanx.data import ElasticBatchSampler
from phalanx.data.shards._shard_source import Expectation
from phalanx.elastic._loader_processes import Attributes, LoaderProcess, bind, reader_of
from phalanx.elastic._rng import derive_seed, seed_everything


@dataclass(frozen=True)
class Ticket:
    """One part of a slot's batch: the unit that is fetched and computed at once."""

    step: int
    slot: int
    part: int
    indices: tuple[int, ...]
    expectation: Expectation | None = dataclasses.field(default=None, compare=False)
    """Which shards are read now and next, for datasets that want to know."""


def split(indices: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """Cut a slot's batch into at most ``num_parts`` parts of nearly equal size, none of them empty.

    >>> split([1, 2, 3, 4, 5], 2)
    [(1, 2), (3, 4, 5)]
    """
    n = min(num_parts, len(indices))
    return [tuple(indices[len(indices) * i // n : len(indices) * (i + 1) // n]) for i in range(n)]


class Schedule:
    """Tells where the job is in its data; moved by commits only. Which samples a (step, slot) has the sampler says."""

    def __init__(self, sampler: ElasticBatchSampler, num_parts: int) -> None:
        self.sampler = sampler
        self.num_parts = num_parts
        self._tells_shards = hasattr(sampler.dataset, "expect")

    @property
    def step(self) -> int:
        """Return the next step to commit; all before it are committed."""
        return self.sampler.step

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def num_samples_per_epoch(self) -> int:
        """Samples that a whole epoch commits; distinct ones, unless the order repeats some."""
        whole = self.sampler.steps_per_epoch * self.sampler.num_slots * self.sampler.slot_batch_size
        return min(whole, self.sampler.order.length)

    def last_step(self, epochs: int | None, max_steps: int | None) -> int:
        """Return how many steps a loop with these limits, of which there is one, will have made at its end."""
        limits = [None if epochs is None else epochs * self.sampler.steps_per_epoch, max_steps]
        return min(limit for limit in limits if limit is not None)

    def tickets(self, step: int, slot: int) -> list[Ticket]:
        """Return the parts of a slot's batch; none if the epoch's last step has no sample left for it."""
        parts = split(self.sampler.indices(step, slot), self.num_parts)
        return [Ticket(step, slot, i, part) for i, part in enumerate(parts)]

    def steps_ahead(self) -> range:
        """Return the steps that are left of the epoch."""
        return range(self.step, self.sampler.end_of_epoch(self.step))

    def told(self, ticket: Ticket, slots: Sequence[int]) -> Ticket:
        """Return the ticket with what it makes a process expect that fetches for ``slots``; once for each (step,
        slot)."""
        if not self._tells_shards or ticket.part:
            return ticket
        windows = self.sampler.windows(ticket.step, ticket.slot)
        if not windows:
            return ticket
        now = dict.fromkeys(shard for window in windows for shard in window.shards)
        upcoming = dict.fromkeys(shard for window in windows for shard in window.upcoming if shard not in now)
        expectation = Expectation(slot=ticket.slot, slots=tuple(slots), shards=tuple(now), upcoming=tuple(upcoming))
        return dataclasses.replace(ticket, expectation=expectation)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class Fetcher(Dataset[Any]):
    """A dataset of tickets over the user's dataset of samples."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.seed = seed

    def __getitem__(self, ticket: Ticket) -> Any:
        if ticket.expectation is not None:
            self.dataset.expect(ticket.expectation)
        seed_everything(derive_seed(self.seed, "data", ticket.step, ticket.slot, ticket.part))
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(list(ticket.indices)) if many else [self.dataset[i] for i in ticket.indices]
        return self.collate_fn(samples)


class Loading:
    """Gives the batches of tickets: fetched when asked for, or read ahead by processes that each have slots of their
    own."""

    def __init__(self, fetcher: Fetcher, num_workers: int) -> None:
        self.fetcher = fetcher
        self.num_workers = num_workers
        self._schedule: Schedule | None = None
        self._slots: Sequence[int] = ()
        self._readers: dict[int, tuple[int, ...]] = {}
        self._processes: dict[int, LoaderProcess[Ticket]] = {}
        self._attributes: Attributes | None = None

    def follow(self, schedule: Schedule, slots: Sequence[int]) -> None:
        """Forget what was read ahead; from now on read along ``slots`` from the schedule's step on."""
        self._schedule, self._slots = schedule, slots
        if not self.num_workers:
            return
        if self._attributes is not None and not self._attributes.are_those_of(self.fetcher.dataset):
            self.close()  # processes that were forked before would not see what was set since
        self._readers = bind(slots, self.num_workers, self._readers)
        for number in sorted({reader for readers in self._readers.values() for reader in readers} | {*self._processes}):
            if number not in self._processes:
                self._processes[number] = LoaderProcess(self.fetcher)
                self._attributes = self._attributes or Attributes(self.fetcher.dataset)
            self._processes[number].follow(self._tickets_of(number))

    def batch(self, ticket: Ticket) -> Any:
        if not self.num_workers:
            return self.fetcher[ticket if self._schedule is None else self._schedule.told(ticket, self._slots)]
        return self._processes[reader_of(self._readers, ticket.step, ticket.slot)].take(ticket)

    def close(self) -> None:
        """End the loader processes; ``follow`` starts others."""
        for process in self._processes.values():
            process.close()
        self._processes, self._readers, self._attributes = {}, {}, None

    def _tickets_of(self, number: int) -> Iterable[Ticket]:
        """Yield what a process reads, in the order in which it will be asked for."""
        schedule, slots, readers = self._schedule, self._slots, self._readers
        assert schedule is not None, "follow() was called"
        own = [slot for slot in slots if number in readers[slot]]

        def tickets() -> Iterator[Ticket]:
            for step in schedule.steps_ahead():
                for slot in own:
                    if reader_of(readers, step, slot) == number:
                        yield from (schedule.told(ticket, own) for ticket in schedule.tickets(step, slot))

        return tickets()
