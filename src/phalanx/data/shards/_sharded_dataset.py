"""A map-style dataset over shards: any sample by its number, read shard by shard.

Owns the step from numbers to shards and back, and the readers of this process (``_open_shards``). It has no position
and no order of its own: samplers and jobs bring theirs (``shuffle="shards"`` reads a few shards at a time), and every
promise that they make of map-style datasets holds for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from phalanx.data._order import Order
from phalanx.data._permutation import Indices
from phalanx.data.shards._mixed_order import MixedOrder
from phalanx.data.shards._open_shards import OpenShards
from phalanx.data.shards._shard_order import ShardOrder
from phalanx.data.shards._shard_source import Expectation, ShardSource
from phalanx.data.shards._shard_table import ShardTable

#: Readers that stay open when nobody says which will be needed.
DEFAULT_MAX_OPEN = 64


class ShardedDataset(Dataset[Any]):
    """All samples of a source, numbered shard after shard.

    ``transform`` makes of a sample what the model takes; it runs where samples are fetched, in the order of the batch.
    Without a job, which says which shards it reads next, the ``max_open`` shards that were used last stay open: give at
    least the lanes that one process reads times the window.

    >>> dataset = ShardedDataset(source, transform=decode)                                  # doctest: +SKIP
    >>> Job(model, optimizer, dataset, num_slots=8, slot_batch_size=32,
    ...     data=DataOptions(shuffle="shards", num_workers=4))                              # doctest: +SKIP
    """

    def __init__(
        self,
        source: ShardSource,
        transform: Callable[[Any], Any] | None = None,
        *,
        max_open: int = DEFAULT_MAX_OPEN,
    ) -> None:
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}; expected at least 1")
        self.source = source
        self.transform = transform
        self.shards = ShardTable(source.sizes, source.fingerprints, source.name_of)
        self.open_shards = OpenShards(source, max_open)

    def __len__(self) -> int:
        return self.shards.length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples, in the order asked for; each shard is read once."""
        numbers = np.asarray(indices, dtype=np.int64)
        self._check(numbers)
        shards, offsets = self.shards.locate(numbers)
        samples: list[Any] = [None] * len(indices)
        by_shard = np.argsort(shards, kind="stable")
        edges = np.flatnonzero(np.diff(shards[by_shard], prepend=-1, append=-1)).tolist()
        places, sought = by_shard.tolist(), offsets[by_shard].tolist()
        for first, stop in itertools.pairwise(edges):
            found = self.open_shards.reader(int(shards[places[first]])).read(sought[first:stop])
            for place, sample in zip(places[first:stop], found, strict=True):
                samples[place] = sample
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def expect(self, expectation: Expectation) -> None:
        """Be told which shards a slot reads now and next; jobs do it."""
        self.open_shards.expect(expectation)

    def adjust_cache(self, order: Order) -> None:
        """Be told by which order the samples are asked for; samplers do it."""
        self.source.adjust_cache(shards_near(order))

    def close(self) -> None:
        """Close the shards that this process has open; reading opens them again."""
        self.open_shards.close()

    def _check(self, numbers: Indices) -> None:
        outside = numbers[(numbers < 0) | (numbers >= len(self))]
        if outside.size:
            raise IndexError(f"sample {int(outside[0])} of a dataset of {len(self)}; expected one in [0, {len(self)})")

    def __getstate__(self) -> dict[str, Any]:
        # For loaders that spawn: the table's names are the source's.
        return {key: value for key, value in self.__dict__.items() if key != "shards"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shards = ShardTable(self.source.sizes, self.source.fingerprints, self.source.name_of)


def shards_near(order: Order) -> int:
    """Return how many shards an order has in current and next windows at a time; 0 where it has no windows."""
    if isinstance(order, MixedOrder):
        return sum(shards_near(part) for part in order.parts)
    return 2 * (order.lanes or 1) * order.window if isinstance(order, ShardOrder) else 0


def read_many(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Return samples of any map-style dataset, at once if it can.

    >>> read_many("abc", [2, 0])
    ['c', 'a']
    """
    many = getattr(dataset, "__getitems__", None)
    return list(many(list(indices))) if many is not None else [dataset[index] for index in indices]


class Concatenated(Dataset[Any]):
    """Datasets one after the other, each asked once for its share of a batch; what ``MixedOrder`` orders.

    >>> Concatenated([[1, 2], [3]]).__getitems__([2, 0])
    [3, 1]
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        self._samples = np.concatenate(([0], np.cumsum([len(dataset) for dataset in self.datasets]))).astype(np.int64)
        counts = [dataset.shards.num_shards if hasattr(dataset, "shards") else 0 for dataset in self.datasets]
        self._shards = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def __len__(self) -> int:
        return int(self._samples[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        numbers = np.asarray(indices, dtype=np.int64)
        if ((numbers < 0) | (numbers >= len(self))).any():
            raise IndexError(f"samples {list(indices)} of a dataset of {len(self)}; expected all in [0, {len(self)})")
        which = np.searchsorted(self._samples, numbers, side="right") - 1
        samples: list[Any] = [None] * len(indices)
        for number in np.unique(which).tolist():
            chosen = np.flatnonzero(which == number)
            own = (numbers[chosen] - self._samples[number]).tolist()
            found = read_many(self.datasets[number], own)
            for place, sample in zip(chosen.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def expect(self, expectation: Expectation) -> None:
        """Tell each dataset of its own shards, which are numbered one dataset after the other."""
        for number, dataset in enumerate(self.datasets):
            first, stop = self._shards[number : number + 2].tolist()
            if first == stop:
                continue
            own = [
                tuple(shard - first for shard in shards if first <= shard < stop)
                for shards in (expectation.shards, expectation.upcoming)
            ]
            dataset.expect(Expectation(slot=expectation.slot, slots=expectation.slots, shards=own[0], upcoming=own[1]))

    def adjust_cache(self, order: Order) -> None:
        """Tell each dataset its own order."""
        parts = order.parts if isinstance(order, MixedOrder) else [order] * len(self.datasets)
        if len(parts) != len(self.datasets):
            raise ValueError(
                f"order {order.name} mixes {len(parts)} sources; expected {len(self.datasets)}, as there are"
            )
        for dataset, part in zip(self.datasets, parts, strict=True):
            if hasattr(dataset, "adjust_cache"):
                dataset.adjust_cache(part)
