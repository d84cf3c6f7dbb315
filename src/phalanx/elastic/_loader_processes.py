"""Keeps loader processes alive as long as a job, each reading for the same slots as long as this worker carries them.

Owns which process reads for which slot (pure: ``bind``), and one process each (a torch loader with one worker). A
process that stays bound to a slot keeps what it has open for it. A new epoch or a regroup only tells the processes what
to read from now on.

Rejected: one loader for all processes. It deals batches out in turn, so that every process would read for every slot
and have all of their shards open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Work = TypeVar("Work")

#: Wrappers of datasets that are looked through.
_DEPTH = 8


def bind(slots: Sequence[int], num_processes: int, before: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Return the processes that read for each slot: those of ``before`` where that is fair, else the least busy ones.

    With fewer slots than processes several read for one slot, a step each in turn.

    >>> bind([0, 1, 2], 2, {})
    {0: (0,), 1: (1,), 2: (0,)}
    >>> bind([1, 2, 3], 2, {0: (0,), 1: (1,), 2: (0,)})
    {1: (1,), 2: (0,), 3: (0,)}
    >>> bind([4], 2, {})
    {4: (0, 1)}
    """
    if not slots:
        return {}
    most = -(-len(slots) // num_processes)
    each = max(1, num_processes // len(slots))
    load = dict.fromkeys(range(num_processes), 0)
    bound: dict[int, list[int]] = {}
    for slot in slots:
        bound[slot] = []
        for process in before.get(slot, ())[:each]:
            if load[process] < most:
                load[process] += 1
                bound[slot].append(process)
    for slot in slots:
        while len(bound[slot]) < each:
            process = min((p for p in load if p not in bound[slot]), key=load.__getitem__)
            load[process] += 1
            bound[slot].append(process)
    for process in [process for process, slots_read in load.items() if not slots_read]:
        bound[min(slots, key=lambda slot: len(bound[slot]))].append(process)
    return {slot: tuple(processes) for slot, processes in bound.items()}


def reader_of(readers: Mapping[int, tuple[int, ...]], step: int, slot: int) -> int:
    """Return the process that reads a (step, slot)."""
    return readers[slot][step % len(readers[slot])]


class LoaderProcess(Generic[Work]):
    """One process that fetches what it is told, ahead of being asked; forked at the first ``follow``."""

    def __init__(self, fetcher: Dataset[Any]) -> None:
        self._errands: _Errands[Work] = _Errands()
        self._loader: DataLoader[Any] | None = DataLoader(
            fetcher,
            sampler=self._errands,
            batch_size=None,
            num_workers=1,
            collate_fn=_keep,
            multiprocessing_context="fork",
            persistent_workers=True,
            generator=torch.Generator(),  # else the loader would draw from the user's
        )
        self._batches: Iterator[Any] = iter(())

    def follow(self, work: Iterable[Work]) -> None:
        """Forget what was read ahead, and read along ``work``."""
        assert self._loader is not None, "the process is not closed"
        self._errands.begin(work)
        self._batches = iter(self._loader)

    def take(self, asked: Work) -> Any:
        """Return what was fetched for ``asked``, which comes in the order that was followed."""
        batch = next(self._batches, _NOTHING)
        assert batch is not _NOTHING, f"nothing was read ahead for {asked}"
        sent = self._errands.sent.popleft()
        assert sent == asked, f"read ahead {sent}, asked for {asked}"
        return batch

    def close(self) -> None:
        """End the process: the loader ends it when nothing holds the loader any more."""
        self._batches = iter(())
        self._loader = None


class _Errands(Generic[Work]):
    """What a loader takes for a sampler: gives the work, and remembers in which order it was given."""

    def __init__(self) -> None:
        self.sent: deque[Work] = deque()
        self._work: Iterator[Work] = iter(())

    def begin(self, work: Iterable[Work]) -> None:
        self.sent = deque()
        self._work = iter(work)

    def __iter__(self) -> Iterator[Work]:
        for work in self._work:
            self.sent.append(work)
            yield work

    def __len__(self) -> int:
        raise TypeError("how much work follows is not known beforehand")


_NOTHING = object()


def _keep(batch: Any) -> Any:
    return batch


class Attributes:
    """What a dataset had set when processes were forked; what was changed since they would not see.

    >>> from types import SimpleNamespace
    >>> dataset = SimpleNamespace(level=1)
    >>> before = Attributes(dataset)
    >>> dataset.level = 2
    >>> before.are_those_of(dataset)
    False
    """

    def __init__(self, dataset: Any) -> None:
        self._values = self._read(dataset)

    def are_those_of(self, dataset: Any) -> bool:
        now = self._read(dataset)
        return len(now) == len(self._values) and all(map(_is_same, self._values, now))

    def _read(self, dataset: Any) -> list[tuple[str, Any, int | None]]:
        found: list[tuple[str, Any, int | None]] = [("", dataset, None)]
        for _ in range(_DEPTH):
            own = getattr(dataset, "__dict__", None)
            if own is None:
                break
            found += [(name, value, _version(value)) for name, value in own.items()]
            dataset = own.get("dataset")
        return found


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def _is_same(before: tuple[str, Any, int | None], now: tuple[str, Any, int | None]) -> bool:
    scalar = isinstance(now[1], (bool, int, float, str)) and type(before[1]) is type(now[1])
    return before[0] == now[0] and before[2] == now[2] and (before[1] is now[1] or (scalar and before[1] == now[1]))
