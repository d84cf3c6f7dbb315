"""Orders a dataset: which index stands at which position of an epoch.

Owns the interface and the orders that need no memory. An order is a value: ``at`` is a pure function
of (seed, epoch, positions), so that any rank can compute any part of any epoch. It knows nothing of
ranks; splitting positions over replicas is ``_partition``'s matter.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.data._permutation import Indices, KeyedPermutation, derive_key, table_permutation

#: Blocks of ``BlockShuffled`` when the user names no size.
DEFAULT_BLOCK_SIZE = 1024


class Order(abc.ABC):
    """The positions [0, length) of an epoch, each with a dataset index.

    Threads may share an order: what it remembers of an epoch is replaced as a whole, never changed.
    """

    #: How many samples an epoch has.
    length: int
    #: One more than the largest index it can give; 0 when that is not known beforehand.
    bound: int

    @property
    def may_repeat(self) -> bool:
        """Whether a dataset index may stand at several positions of an epoch. An order that does not say may."""
        return True

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the order is; saved with a position, since a position means nothing under another order."""

    @abc.abstractmethod
    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        """Return the dataset indices at ``positions``, an int64 array of numbers in [0, length)."""

    def settle(self, lanes: int, run: int) -> Order:
        """Return the order with what its user left open: ``lanes`` readers take ``run`` samples each in turn."""
        return self

    def parameters(self) -> dict[str, Any]:
        """Return what is saved beside the name, as JSON-able values; most orders have nothing to add."""
        return {}

    def adopt(self, parameters: Mapping[str, Any]) -> Order:
        """Return the order with saved ``parameters``; refuse those that it cannot go on with."""
        return self


def checked_length(length: int) -> int:
    if length < 1:
        raise ValueError(f"an order over {length} samples is empty; expected at least one sample")
    return int(length)


class Sequential(Order):
    """0, 1, 2, ... in every epoch.

    >>> Sequential(3).at(0, 0, np.arange(3)).tolist()
    [0, 1, 2]
    """

    def __init__(self, length: int) -> None:
        self.length = self.bound = checked_length(length)

    @property
    def may_repeat(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "sequential"

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        return positions


class Shuffled(Order):
    """Another random order of ``inner`` in each epoch (``inner``: an order, or a number of samples).

    >>> sorted(Shuffled(4).at(0, 0, np.arange(4)).tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, inner: Order | int) -> None:
        self.inner = inner if isinstance(inner, Order) else Sequential(inner)
        if isinstance(self.inner, Shuffled):  # twice the same permutation would not be uniform; once is
            self.inner = self.inner.inner
        self.length, self.bound = self.inner.length, self.inner.bound
        self._of: tuple[int, int, KeyedPermutation] | None = None

    @property
    def may_repeat(self) -> bool:
        return self.inner.may_repeat

    @property
    def name(self) -> str:
        return f"shuffled({self.inner.name})"

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        of = self._of
        if of is None or of[:2] != (seed, epoch):
            of = self._of = seed, epoch, KeyedPermutation(self.length, derive_key("shuffled", seed, epoch))
        return self.inner.at(seed, epoch, of[2](positions))


class BlockShuffled(Order):
    """Blocks of neighbours in random order, each block shuffled inside: reads stay local on slow storage.

    ``block_size`` positions in a row come from one block, so a reader touches one block at a time. The
    short block that is left when the length does not divide has a random place among the others.

    >>> BlockShuffled(10, block_size=5).at(0, 0, np.arange(5)).max() - 4 in (0, 5)
    True
    """

    def __init__(self, inner: Order | int, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; expected at least 1")
        self.inner = inner if isinstance(inner, Order) else Sequential(inner)
        self.length, self.bound = self.inner.length, self.inner.bound
        self.block_size = min(block_size, self.length)
        self._blocks: tuple[int, int, KeyedPermutation] | None = None
        self._inside: dict[tuple[int, int, int], Indices] = {}

    @property
    def may_repeat(self) -> bool:
        return self.inner.may_repeat

    @property
    def name(self) -> str:
        return f"block_shuffled({self.inner.name},{self.block_size})"

    def at(self, seed: int, epoch: int, positions: Indices) -> Indices:
        size = self.block_size
        num_full, short = divmod(self.length, size)
        blocks = self._blocks
        if blocks is None or blocks[:2] != (seed, epoch):
            key = derive_key("blocks", seed, epoch)
            blocks = self._blocks = seed, epoch, KeyedPermutation(num_full, key)
        # Where the short block stands: before that many full ones. It is block number num_full.
        place = int.from_bytes(derive_key("short block", seed, epoch)[:16], "little") % (num_full + 1)
        in_short = (positions >= place * size) & (positions < place * size + short)
        shifted = np.where(positions >= place * size + short, positions - short, positions)
        # Positions of the short block get any valid full block here, and their own below.
        slot = np.minimum(shifted // size, num_full - 1)
        block = np.where(in_short, num_full, blocks[2](slot))
        offset = np.where(in_short, positions - place * size, shifted - shifted // size * size)
        result = np.empty_like(positions)
        # Positions mostly ascend, so that equal blocks stand together: one lookup per run of them.
        edges = np.flatnonzero(np.diff(block, prepend=-1, append=-1)).tolist()
        for first, stop in itertools.pairwise(edges):
            number = int(block[first])
            inside = self._shuffle_inside(seed, epoch, number, size if number < num_full else short)
            result[first:stop] = number * size + inside[offset[first:stop]]
        return self.inner.at(seed, epoch, result)

    def _shuffle_inside(self, seed: int, epoch: int, block: int, size: int) -> Indices:
        wanted = (seed, epoch, block)
        table = self._inside.get(wanted)
        if table is None:
            table = table_permutation(derive_key("inside", *wanted), size)
            # Readers go on from block to block: the last few are enough.
            self._inside = dict([*self._inside.items(), (wanted, table)][-4:])
        return table
