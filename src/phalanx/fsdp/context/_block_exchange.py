"""How keys and values of other ranks come here, and gradients go back to them.

Owns the two ways, each as one class: ``BlockRing`` passes blocks from rank to rank, ``BlockGather`` fetches all at
once. What they cost on W ranks, where one block (keys and values of one rank, or their gradients) has n elements:

- ``BlockRing``: forward W - 1 all-to-alls of n elements each, in which every rank sends to the next one only; backward
  W - 1 of the keys and values and W - 1 of their gradients. Two blocks are in memory.
- ``BlockGather``: forward one all-gather of W n elements, backward the same and one reduce-scatter of W n elements. All
  blocks are in memory.

Both give the blocks in the same order (this rank's, then that of the rank before it, and so on), so what is computed
from them has the same bits. The next block travels while the caller computes with this one. Gradients travel in the
exact dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.comm import Group, Work


class BlockExchange(ABC):
    """Blocks are flat tensors, ``sizes[r]`` elements for rank r."""

    def __init__(self, group: Group, sizes: Sequence[int]) -> None:
        self._group = group
        self._sizes = sizes

    def _source(self, step: int) -> int:
        return (self._group.rank - step) % self._group.size

    @abstractmethod
    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its block) for every rank, this one first. The next block is under way meanwhile."""

    @abstractmethod
    def gradients(self, own: Tensor) -> BlockGradientSum:
        """Return what adds up the gradients of blocks, given this rank's part of its own block's."""


class BlockGradientSum(ABC):
    """Adds up what all ranks have for each block, at the rank whose block it is."""

    @abstractmethod
    def add(self, source: int, gradient: Tensor) -> None:
        """Give this rank's part for the block of ``source``; called in the order of ``blocks``, not for its own."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return the sum for this rank's own block."""


class BlockRing(BlockExchange):
    """Each block visits all ranks."""

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        block = own
        for step in range(self._group.size):
            under_way = None
            if step < self._group.size - 1:
                under_way = self.pass_on(block, self._source(step + 1))
            yield self._source(step), block
            if under_way is not None:
                block, work = under_way
                work.wait()

    def gradients(self, own: Tensor) -> BlockGradientSum:
        return _RingSum(self, own)

    def pass_on(self, block: Tensor, coming: int) -> tuple[Tensor, Work]:
        """Send ``block`` to the next rank; the block of rank ``coming`` arrives from the one before."""
        group = self._group
        received = block.new_empty(self._sizes[coming])
        inputs, outputs = ([block.new_empty(0)] * group.size for _ in range(2))
        inputs[(group.rank + 1) % group.size] = block
        outputs[(group.rank - 1) % group.size] = received
        return received, group.all_to_all(outputs, inputs, async_op=True)

    def following(self, source: int) -> int:
        """Return whose block arrives when that of ``source`` is passed on."""
        return (source - 1) % self._group.size


class _RingSum(BlockGradientSum):
    """The sum for a block begins at the rank after its own, follows the block, and ends where it belongs."""

    def __init__(self, ring: BlockRing, own: Tensor) -> None:
        self._ring = ring
        self._own = own
        self._under_way: tuple[Tensor, Work] | None = None

    def add(self, source: int, gradient: Tensor) -> None:
        arrived = self._arrived()
        if arrived is not None:
            gradient = arrived.add_(gradient)
        self._under_way = self._ring.pass_on(gradient, self._ring.following(source))

    def total(self) -> Tensor:
        arrived = self._arrived()
        return self._own if arrived is None else arrived.add_(self._own)

    def _arrived(self) -> Tensor | None:
        if self._under_way is None:
            return None
        tensor, work = self._under_way
        work.wait()
        return tensor


class BlockGather(BlockExchange):
    """All blocks at once."""

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        group = self._group
        everything = own.new_empty(sum(self._sizes)).split(list(self._sizes))
        work = group.all_gather(everything, own, async_op=True) if group.size > 1 else None
        yield group.rank, own
        if work is not None:
            work.wait()
        for step in range(1, group.size):
            yield self._source(step), everything[self._source(step)]

    def gradients(self, own: Tensor) -> BlockGradientSum:
        return _ScatteredSum(self._group, own)


class _ScatteredSum(BlockGradientSum):
    def __init__(self, group: Group, own: Tensor) -> None:
        self._group = group
        self._parts: dict[int, Tensor] = {group.rank: own}

    def add(self, source: int, gradient: Tensor) -> None:
        self._parts[source] = gradient

    def total(self) -> Tensor:
        group = self._group
        own = self._parts[group.rank]
        if group.size == 1:
            return own
        result = torch.empty_like(own)
        group.reduce_scatter(result, [self._parts[rank] for rank in range(group.size)])
        return result


EXCHANGES: dict[str, type[BlockExchange]] = {"alltoall": BlockRing, "allgather": BlockGather}
"""By the names that ``set_rotate_method`` takes."""
