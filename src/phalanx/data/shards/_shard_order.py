"""Orders the samples of shards such that few shards are open at a time and samples are well mixed all the same.

A keyed permutation puts the shards into a row. The row is cut, between samples, into lanes of equal length. Inside a
lane, ``window`` shards at a time are mixed by a keyed permutation of all their samples; where a lane's first window
ends is random (its phase), so that lanes do not change windows all at once. Positions take ``run`` samples of each lane
in turn:

    position  0 ..  run-1 | run .. 2*run-1 | ...      lanes 0, 1, ..., lanes-1, and lane 0 again

With one lane per slot and runs of the slot's batch, a slot reads one lane, so a worker has slots x window shards open.
What does not fill a turn of all lanes comes last, lane after lane. Every position is computed on its own, in memory
that grows with the number of shards only.

Orders are saved by position, so they must never change: a test freezes sample values.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data._order import Order
from phalanx.data._permutation import Indices, KeyedPermutation, derive_key, random_words
from phalanx.data.shards._shard_table import ShardTable

#: Shards that are mixed at a time in each lane.
DEFAULT_WINDOW = 8


@dataclass(frozen=True, kw_only=True)
class ShardWindow:
    """What is mixed at one time in one lane: the places [first, stop) of the row, and the shards that they are in."""

    first: int
    stop: int
    shards: tuple[int, ...]
    upcoming: tuple[int, ...]
    """The shards of the lane's next window."""

    def shifted(self, first_shard: int) -> ShardWindow:
        """Return the window with its shards numbered from ``first_shard`` on."""
        moved = [tuple(shard + first_shard for shard in shards) for shards in (self.shards, self.upcoming)]
        return ShardWindow(first=self.first, stop=self.stop, shards=moved[0], upcoming=moved[1])


class ShardOrder(Order):
    """Another random order in each epoch that reads a few shards at a time (see the module).

    ``shards`` is a ``ShardedDataset`` (anything with ``shards``), a ``ShardTable``, or the sizes of the shards.
    ``lanes`` and ``run`` are chosen by the sampler if left out: its slots and their batch. All three are saved with a
    position, and taken over from there.

    >>> order = ShardOrder([4, 4, 4], lanes=2, run=2, window=1)
    >>> sorted(order.at(0, 0, np.arange(12)).tolist()) == list(range(12))
    True
    """

    def __init__(
        self, shards: Any, *, lanes: int | None = None, run: int | None = None, window: int = DEFAULT_WINDOW
    ) -> None:
        self.table = table_of(shards)
        for name, value in (("lanes", lanes), ("run", run), ("window", window)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.lanes, self.run, self.window = lanes, run, window
        self.length = self.bound = self.table.length
        self._row: _Row | None = None

    @property
    def may_repeat(self) -> bool:
        return False

    @property
    def name(self) -> str:
        # Lanes, run and window are left out: they are adopted, so workers may differ in them until then.
        return f"shards({self.table.digest})"

    def settle(self, lanes: int, run: int) -> ShardOrder:
        if self.lanes is not None and self.run is not None:
            return self
        settled = ShardOrder(self.table, lanes=self.lanes or lanes, run=self.run or run, window=self.window)
        settled._warn_of_few_shards()
        return settled

    def parameters(self) -> dict[str, Any]:
        own = {"lanes": self.lanes, "run": self.run, "window": self.window}
        return {**own, "digest": self.table.digest, "marks": self.table.marks}

    def adopt(self, parameters: Mapping[str, Any]) -> ShardOrder:
        if "marks" not in parameters:
            return self  # of another order, which is refused by its name
        self.table.check(parameters)
        chosen = {name: parameters.get(name) for name in ("lanes", "run", "window")}
        for name, value in chosen.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"sampler state has {name}={value!r}; expected an integer")
        return ShardOrder(self.table, **chosen)  # type: ignore[arg-type]  # all integers, as was just checked

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        row = self._row_of(seed, epoch)
        places = row.mix(row.place_of(positions))
        piece = np.searchsorted(row.edges, places, side="right") - 1
        return self.table.starts[row.shards[piece]] + (places - row.edges[piece])

    def windows_at(self, seed: int, epoch: int, positions: Indices) -> list[ShardWindow]:
        """Return the windows that ``positions`` are in: what has to be open to read them, and what will be next."""
        return self._row_of(seed, epoch).windows(positions)

    def _row_of(self, seed: int, epoch: int) -> _Row:
        row = self._row
        if row is None or (row.seed, row.epoch) != (seed, epoch):
            if self.lanes is None or self.run is None:
                raise ValueError("lanes and run of a ShardOrder are open; give them, or give the order to a sampler")
            row = self._row = _Row(self.table, self.lanes, self.run, self.window, seed, epoch)
        return row

    def _warn_of_few_shards(self) -> None:
        filled = int(np.count_nonzero(self.table.sizes))
        if self.lanes is not None and filled < self.lanes:
            warnings.warn(
                f"{filled} shards for {self.lanes} lanes: each lane, and so each slot's batch, reads from a part of "
                "one or two shards. Samples that stand together in a shard stay together; use more, smaller shards",
                stacklevel=4,
            )


def table_of(shards: Any) -> ShardTable:
    """Return the table of whatever has shards: a table, a dataset with ``shards``, or sizes."""
    if isinstance(shards, ShardTable):
        return shards
    found = getattr(shards, "shards", None)
    if isinstance(found, ShardTable):
        return found
    if isinstance(shards, (Sequence, np.ndarray)) and not isinstance(shards, (str, bytes)):
        return ShardTable(shards)
    raise TypeError(
        f"{type(shards).__name__} has no shards; expected a ShardedDataset, a ShardTable, or the sizes of shards"
    )


class _Row:
    """All shards of an epoch in their order, cut into lanes and windows."""

    def __init__(self, table: ShardTable, lanes: int, run: int, window: int, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self.lanes, self.run, self.window = lanes, run, window
        filled = np.flatnonzero(table.sizes)
        permutation = KeyedPermutation(filled.size, derive_key("shards", seed, epoch))
        self.shards: Indices = filled[permutation(np.arange(filled.size, dtype=np.int64))]
        self.edges: Indices = np.concatenate(([0], np.cumsum(table.sizes[self.shards])))
        each, rest = divmod(table.length, lanes)
        numbers = np.arange(lanes + 1, dtype=np.int64)
        #: Where each lane begins in the row; equal lengths, but for one sample.
        self.starts: Indices = numbers * each + numbers * rest // lanes
        #: So much of each lane is taken in turns; what is left of each stands at the end, lane after lane.
        self.in_turns = each // run * run
        self.rests: Indices = self.starts - numbers * self.in_turns
        self.first_piece: Indices = np.searchsorted(self.edges, self.starts[:-1], side="right") - 1
        words = random_words(derive_key("phases", seed, epoch), lanes)
        self.phase: Indices = (words % np.uint64(window)).astype(np.int64) + 1
        self._permutation = functools.lru_cache(maxsize=2 * lanes)(self._permutation_of)

    def place_of(self, positions: Indices) -> Indices:
        """Return where in the row each position takes its sample, before mixing."""
        lane, offset = self._lane_of(positions)
        return self.starts[lane] + offset

    def _lane_of(self, positions: Indices) -> tuple[Indices, Indices]:
        turn, inside = np.divmod(positions, self.lanes * self.run)
        lane, step = np.divmod(inside, self.run)
        last = positions - self.in_turns * self.lanes
        is_rest = last >= 0
        if is_rest.any():
            lane_of_rest = np.searchsorted(self.rests, last, side="right") - 1
            lane = np.where(is_rest, lane_of_rest, lane)
            # Positions before the end have any valid lane here; what they would get is not taken.
            offset_of_rest = self.in_turns + last - self.rests[lane]
            return lane, np.where(is_rest, offset_of_rest, turn * self.run + step)
        return lane, turn * self.run + step

    def mix(self, places: Indices) -> Indices:
        """Return the places whose samples stand at ``places`` once each window is mixed."""
        _, _, _, first, stop = self._windows_of(places)
        if (first == first[:1]).all():  # of one window, as those of one slot mostly are
            begin = int(first[0]) if first.size else 0
            return begin + self._permutation(begin, int(stop[0]) - begin)(places - begin) if first.size else places
        result = np.empty_like(places)
        begins, which = np.unique(first, return_inverse=True)
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(begins.size + 1))
        for number, begin in enumerate(begins.tolist()):
            chosen = order[bounds[number] : bounds[number + 1]]
            permutation = self._permutation(begin, int(stop[chosen[0]]) - begin)
            result[chosen] = begin + permutation(places[chosen] - begin)
        return result

    def windows(self, positions: Indices) -> list[ShardWindow]:
        """Return the windows that positions are in, each once."""
        lane, piece, end, first, stop = self._windows_of(self.place_of(positions))
        found = []
        for index in np.unique(first, return_index=True)[1].tolist():
            lane_stop = int(self.starts[int(lane[index]) + 1])
            after = min(int(end[index]) + self.window, int(np.searchsorted(self.edges, lane_stop)))
            found.append(
                ShardWindow(
                    first=int(first[index]),
                    stop=int(stop[index]),
                    shards=tuple(self.shards[int(piece[index]) : int(end[index])].tolist()),
                    upcoming=tuple(self.shards[int(end[index]) : after].tolist()),
                )
            )
        return found

    def _windows_of(self, places: Indices) -> tuple[Indices, Indices, Indices, Indices, Indices]:
        """Return of the window of each place: its lane, its pieces [first, end), its places [first, stop)."""
        lane = np.searchsorted(self.starts, places, side="right") - 1
        piece = np.searchsorted(self.edges, places, side="right") - 1
        # From the end of the lane's first window, which is ``phase`` pieces long, windows have ``window`` pieces.
        second = self.first_piece[lane] + self.phase[lane]
        later = piece >= second
        first_piece = np.where(later, second + (piece - second) // self.window * self.window, self.first_piece[lane])
        end_piece = np.where(later, first_piece + self.window, second)
        lane_stop = self.starts[lane + 1]
        end_piece = np.minimum(end_piece, np.searchsorted(self.edges, lane_stop, side="left"))
        first = np.maximum(self.edges[first_piece], self.starts[lane])
        stop = np.minimum(self.edges[end_piece], lane_stop)
        return lane, first_piece, end_piece, first, stop

    def _permutation_of(self, begin: int, length: int) -> KeyedPermutation:
        return KeyedPermutation(length, derive_key("window", self.seed, self.epoch, begin))
