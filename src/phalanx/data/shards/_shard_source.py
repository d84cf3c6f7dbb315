"""Says what a source of shards offers, and what a reader is told of what comes next.

Owns the interface only. A shard is the smallest unit that can be read alone: a tar file with an index, a row group of a
Parquet file. Sources are made before processes are forked and hold no open file; readers belong to one process.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.data._permutation import Indices
from phalanx.data.shards._shard_table import Words


class ShardReader(abc.ABC):
    """One shard, open in this process."""

    @abc.abstractmethod
    def read(self, offsets: Sequence[int]) -> list[Any]:
        """Return the samples at these places of the shard, in this order."""

    def close(self) -> None:
        """Give back what it holds."""
        return


class ShardSource(abc.ABC):
    """Shards of samples, each of which can be opened and read alone.

    >>> import numpy as np
    >>> class Numbers(ShardSource):
    ...     sizes, fingerprints = np.array([2, 3]), np.zeros(2, np.uint64)
    ...     def open(self, shard): return NumbersReader(shard)
    >>> class NumbersReader(ShardReader):
    ...     def __init__(self, shard): self.shard = shard
    ...     def read(self, offsets): return [(self.shard, offset) for offset in offsets]
    >>> Numbers().open(1).read([2, 0])
    [(1, 2), (1, 0)]
    """

    #: Samples of each shard; 0 is allowed.
    sizes: Indices
    #: A word for each shard that changes when the shard does.
    fingerprints: Words

    @abc.abstractmethod
    def open(self, shard: int) -> ShardReader:
        """Return a reader for this process."""

    def name_of(self, shard: int) -> str:
        """Return what people know the shard by; for messages."""
        return f"shard {shard}"

    def prepare(self, shard: int) -> None:
        """Bring a shard near that will be read soon; called in a thread, and may be left out."""
        return

    def expect(self, shards: Sequence[int], upcoming: Sequence[int]) -> None:
        """Take note which shards this process reads now, and which it will read next."""
        return

    def adjust_cache(self, num_shards: int) -> None:
        """Take note that up to ``num_shards`` are read now or next, on all nodes together."""
        return


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a process that fetches for ``slots`` needs for ``slot``: shards that are read now, and those that come
    next."""

    slot: int
    slots: tuple[int, ...]
    shards: tuple[int, ...]
    upcoming: tuple[int, ...]
