"""Fetches the samples of one (step, slot): in this process or by loader processes, with the same bits either way.

Whoever fetches seeds the random generators from (seed, step, slot, part) first, so augmentation does not depend on
the process that does it. Prefetching reads ahead along the slots that this worker carries now; after a regroup the
reader is made anew. Nothing counts as consumed here: only a commit moves the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from phalanx.data import ElasticBatchSampler
from phalanx.elastic._rng import derive_seed, seed_everything


@dataclass(frozen=True)
class Ticket:
    """One part of a slot's batch: the unit that is fetched and computed at once."""

    step: int
    slot: int
    part: int
    indices: tuple[int, ...]


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

    def tickets(self, step: int, slot: int) -> list[Ticket]:
        """Return the parts of a slot's batch; none if the epoch's last step has no sample left for it."""
        parts = split(self.sampler.indices(step, slot), self.num_parts)
        return [Ticket(step, slot, i, part) for i, part in enumerate(parts)]

    def ahead(self, slots: range) -> Iterator[Ticket]:
        """Return all tickets of some slots up to the end of the epoch, in the order in which they will be computed."""
        for step in range(self.step, self.sampler.end_of_epoch(self.step)):
            for slot in slots:
                yield from self.tickets(step, slot)

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
        seed_everything(derive_seed(self.seed, "data", ticket.step, ticket.slot, ticket.part))
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(list(ticket.indices)) if many else [self.dataset[i] for i in ticket.indices]
        return self.collate_fn(samples)


class Loading:
    """Gives the batches of tickets in the order in which ``tickets`` foretells them."""

    def __init__(self, fetcher: Fetcher, num_workers: int) -> None:
        self.fetcher = fetcher
        self.num_workers = num_workers
        self._ahead: Iterator[tuple[Ticket, Any]] | None = None

    def follow(self, tickets: Callable[[], Iterator[Ticket]]) -> None:
        """Forget what was read ahead; from now on read along ``tickets()``."""
        self.close()
        if self.num_workers:
            self._ahead = self._read(tickets)

    def batch(self, ticket: Ticket) -> Any:
        if self._ahead is None:
            return self.fetcher[ticket]
        for got, batch in self._ahead:
            assert got == ticket, f"read ahead {got}, asked for {ticket}"
            return batch
        raise AssertionError(f"nothing was read ahead for {ticket}")

    def close(self) -> None:
        self._ahead = None

    def _read(self, tickets: Callable[[], Iterator[Ticket]]) -> Iterator[tuple[Ticket, Any]]:
        loader: DataLoader[Any] = DataLoader(
            self.fetcher,
            sampler=_Tickets(tickets),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_keep,
            multiprocessing_context="fork",
        )
        return zip(tickets(), loader, strict=True)


class _Tickets:
    def __init__(self, tickets: Callable[[], Iterator[Ticket]]) -> None:
        self.tickets = tickets

    def __iter__(self) -> Iterator[Ticket]:
        return self.tickets()

    def __len__(self) -> int:
        raise TypeError("how many tickets follow is not known beforehand")


def _keep(batch: Any) -> Any:
    return batch
