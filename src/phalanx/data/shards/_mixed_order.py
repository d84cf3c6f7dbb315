"""Mixes several sources in exact proportions: every cycle of positions holds the same number of samples of each.

Owns which source stands at which position. A cycle has ``sum(counts)`` positions, of which exactly ``counts[k]`` are of
source k, in a pattern keyed by the cycle. Each source is gone through in its own order, epoch after epoch of its own,
whatever the mix calls an epoch: no sample of it is left out or comes early. One position is still the whole state.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.data._order import Order
from phalanx.data._permutation import Indices, derive_key
from phalanx.data._wrapped_orders import OrderLike, as_order, uniform_at
from phalanx.data.shards._shard_order import ShardOrder, ShardWindow


class MixedOrder(Order):
    """Exactly ``counts[k]`` samples of source k in every ``sum(counts)`` positions.

    ``parts`` are orders over datasets that stand one after the other (``Concatenated``), of ``sizes`` samples each (by
    default those that each order covers). An epoch has ``num_cycles`` cycles; by default as many as the source that is
    used up first has.

    >>> order = MixedOrder([range(6), range(4)], counts=[3, 1])
    >>> order.length, [int((order.at(0, 0, np.arange(first, first + 4)) >= 6).sum()) for first in (0, 4)]
    (8, [1, 1])
    """

    def __init__(
        self,
        parts: Sequence[OrderLike],
        counts: Sequence[int],
        sizes: Sequence[int] | None = None,
        num_cycles: int | None = None,
    ) -> None:
        self.parts = [as_order(part) for part in parts]
        self.counts = [int(count) for count in counts]
        self.sizes = [part.bound for part in self.parts] if sizes is None else [int(size) for size in sizes]
        if not self.parts or not len(self.parts) == len(self.counts) == len(self.sizes):
            raise ValueError(
                f"{len(self.parts)} parts, {len(self.counts)} counts and {len(self.sizes)} sizes; expected one of each "
                "for each source"
            )
        for number, (part, count, size) in enumerate(zip(self.parts, self.counts, self.sizes, strict=True)):
            if count < 1:
                raise ValueError(f"counts[{number}] is {count}; expected at least 1 sample of each source in a cycle")
            if size < max(1, part.bound):
                raise ValueError(
                    f"source {number} ({part.name}) gives indices up to {part.bound - 1} of a dataset of size {size}; "
                    "pass sizes=[...] with the length of each dataset"
                )
        shortest = min(part.length // count for part, count in zip(self.parts, self.counts, strict=True))
        self.num_cycles = max(1, shortest) if num_cycles is None else num_cycles
        if self.num_cycles < 1:
            raise ValueError(f"num_cycles is {num_cycles}; expected at least 1")
        self.length = self.num_cycles * sum(self.counts)
        self.bound = sum(self.sizes)
        self._label = np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def may_repeat(self) -> bool:
        # A source that does not fit into the epoch exactly begins its next one in the middle of an epoch of the mix.
        exact = (
            part.length % (count * self.num_cycles) == 0 for part, count in zip(self.parts, self.counts, strict=True)
        )
        return not all(exact) or any(part.may_repeat for part in self.parts)

    @property
    def name(self) -> str:
        listed = zip(self.parts, self.sizes, self.counts, strict=True)
        return f"mixed({','.join(f'{part.name}:{size}x{count}' for part, size, count in listed)};{self.num_cycles})"

    def settle(self, lanes: int, run: int) -> MixedOrder:
        # A reader's run holds that many samples of each source, if it is made of complete cycles.
        cycle = sum(self.counts)
        runs = [max(1, run * count // cycle) for count in self.counts]
        return self._with([part.settle(lanes, own) for part, own in zip(self.parts, runs, strict=True)])

    def parameters(self) -> dict[str, Any]:
        own = [part.parameters() for part in self.parts]
        return {"parts": own} if any(own) else {}

    def adopt(self, parameters: Mapping[str, Any]) -> MixedOrder:
        saved = parameters.get("parts")
        if not isinstance(saved, list) or len(saved) != len(self.parts):
            return self  # of another order, which is refused by its name
        return self._with([part.adopt(own) for part, own in zip(self.parts, saved, strict=True)])

    def _with(self, parts: Sequence[Order]) -> MixedOrder:
        return MixedOrder(parts, self.counts, self.sizes, self.num_cycles)

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        label, offset = self._split(seed, epoch, positions)
        result = np.empty_like(positions)
        first_index = list(itertools.accumulate(self.sizes, initial=0))
        for number in np.unique(label).tolist():
            chosen = label == number
            rounds, local = np.divmod(offset[chosen], self.parts[number].length)
            found = np.empty_like(local)
            for own_epoch in np.unique(rounds).tolist():
                inside = rounds == own_epoch
                found[inside] = self.parts[number].at(self._seed_of(seed, number), own_epoch, local[inside])
            result[chosen] = found + first_index[number]
        return result

    def windows_at(self, seed: int, epoch: int, positions: Indices) -> list[ShardWindow]:
        """Return the windows of all sources that positions are in; shards are numbered source after source."""
        label, offset = self._split(seed, epoch, positions)
        found, first_shard = [], 0
        for number, part in enumerate(self.parts):
            if not isinstance(part, ShardOrder):
                continue
            rounds, local = np.divmod(offset[label == number], part.length)
            for own_epoch in np.unique(rounds).tolist():
                windows = part.windows_at(self._seed_of(seed, number), own_epoch, local[rounds == own_epoch])
                found += [window.shifted(first_shard) for window in windows]
            first_shard += part.table.num_shards
        return found

    def _seed_of(self, seed: int, number: int) -> int:
        return int.from_bytes(derive_key("source", seed, number)[:8], "little")

    def _split(self, seed: int, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source of each position, and how many samples of that source came before, in all epochs."""
        size = self._label.size
        cycles, which = np.unique(positions // size, return_inverse=True)
        words = uniform_at(derive_key("cycles", seed, epoch), cycles[:, None] * size + np.arange(size))
        pattern = self._label[np.argsort(words, axis=1, kind="stable")]  # [cycle, place]: the source there
        before = np.empty_like(pattern)  # [cycle, place]: of the same source, earlier in the cycle
        for number in range(len(self.counts)):
            there = pattern == number
            before[there] = (np.cumsum(there, axis=1) - 1)[there]
        inside = positions % size
        label = pattern[which, inside]
        cycle = epoch * self.num_cycles + cycles[which]
        return label, cycle * np.asarray(self.counts)[label] + before[which, inside]
