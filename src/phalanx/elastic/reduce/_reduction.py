"""Completes the slot tree across workers: two collectives per bucket and step, none for a worker alone.

Phases, for each bucket cut into one chunk per worker:
1. all_to_all: every worker sends, to the owner of each chunk, that chunk of all its pieces.
2. The owner folds the pieces of all workers along the tree, in blocks that fit the cache.
3. all_gather: every worker receives all finished chunks.

Buckets go one after the other in one order, alike on all workers however early each of them has its gradients: the
all_to_all of a bucket comes before the all_gather of the one before it. So a worker that has a bucket while it still
computes the next one can send it (``BucketSums.send``) and folds it when it comes by again.

On one host pieces and sums lie in shared memory: collectives read them where they are, nothing is copied in.

Owns the plan of one group (who sends how many pieces) and its receive buffers. Changes nothing but the flats it is
given: when a collective fails, the step can be dropped as if it had never begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.comm import Group, Work
from phalanx.elastic.reduce._deal import even_deal, ranges_of
from phalanx.elastic.reduce._flat_layout import Bucket, Flat
from phalanx.elastic.reduce._partials import Partials, Pool
from phalanx.elastic.reduce._slots import Node, cover, fold

BLOCK = 65536
"""Elements that are folded at a time: 256 KB of float32."""


class MessageWatch(Protocol):
    """Looks at what is exchanged, by rank; what a worker keeps for itself is no message."""

    def sent(self, tensors: Sequence[Tensor], rank: int) -> None: ...

    def received(self, tensors: Sequence[Tensor], rank: int) -> None: ...


class SentBucket(NamedTuple):
    """A bucket in phase 1: what comes from each worker, and what goes to each, until ``work`` is done."""

    bucket: int
    received: list[Tensor]
    outgoing: list[Tensor]
    work: Work


class Reduction:
    """The reduction of one group; ``group`` is None for a worker alone. ``sizes`` says how many slots each worker
    carries; evenly dealt if nothing is said."""

    def __init__(self, group: Group | None, num_slots: int, pool: Pool, sizes: tuple[int, ...] | None = None) -> None:
        self.group = group
        self.num_slots = num_slots
        self.pool = pool
        self.in_place = pool.use(group)
        size, self.rank = (group.size, group.rank) if group is not None else (1, 0)
        pool.fit(size)
        self.sizes = even_deal(num_slots, size) if sizes is None else sizes
        assert (len(self.sizes), sum(self.sizes)) == (size, num_slots), f"{self.sizes} of {num_slots} slots on {size}"
        self.watch: MessageWatch | None = None
        self.ranges = ranges_of(self.sizes)
        self.slots = self.ranges[self.rank]
        self.nodes = [cover(num_slots, slots) for slots in self.ranges]
        self.received = [self._receive_buffers(bucket) for bucket in pool.layout.buckets]

    @property
    def size(self) -> int:
        return len(self.sizes)

    @property
    def is_alone(self) -> bool:
        return len(self.nodes) == 1

    def reduce(self, partials: Partials) -> Flat:
        """Return the root of the tree. Takes the pieces of ``partials``; give the result back to the pool when done."""
        return BucketSums(self, partials, is_async=False).finish()

    def _receive_buffers(self, bucket: Bucket) -> list[Tensor]:
        if self.is_alone:
            return []
        chunk = self.pool.layout.chunk(bucket, len(self.nodes))
        counts = [len(nodes) if rank != self.rank else 0 for rank, nodes in enumerate(self.nodes)]
        return [self.pool.empty(count * chunk, bucket.dtype) for count in counts]

    def exchange(self, i: int, mine: Sequence[Tensor], *, is_async: bool) -> SentBucket:
        """Phase 1 of a bucket, of which ``mine`` are this worker's pieces."""
        group, bucket = self.group, self.pool.layout.buckets[i]
        assert group is not None, "a worker alone exchanges nothing"
        chunk = self.pool.layout.chunk(bucket, group.size)
        outgoing = []
        for owner in range(group.size):
            parts = [tensor[owner * chunk : (owner + 1) * chunk] for tensor in mine]
            if owner == self.rank or not parts:
                outgoing.append(torch.empty(0, dtype=bucket.dtype, device=self.pool.layout.device))
            else:
                outgoing.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        if self.watch is not None:
            self.watch.sent(outgoing, self.rank)
        received = list(self.received[i])
        if self.in_place and len(mine) == 1:
            # One piece, sent from where it lies: the chunks must follow each other, so this worker's own, which moves
            # from itself to itself, is among them.
            own = mine[0][self.rank * chunk : (self.rank + 1) * chunk]
            outgoing[self.rank] = received[self.rank] = own
        return SentBucket(i, received, outgoing, group.all_to_all(received, outgoing, async_op=is_async))

    def fold_own(self, i: int, mine: Sequence[Tensor], received: Sequence[Tensor]) -> Tensor:
        """Phase 2: return the sum of this worker's chunk."""
        bucket = self.pool.layout.buckets[i]
        chunk = self.pool.layout.chunk(bucket, len(self.nodes))
        pieces: dict[Node, Tensor] = {}
        for rank, nodes in enumerate(self.nodes):
            for k, node in enumerate(nodes):
                if rank == self.rank:
                    pieces[node] = mine[k][self.rank * chunk : (self.rank + 1) * chunk]
                else:
                    pieces[node] = received[rank][k * chunk : (k + 1) * chunk]
        summed = min(max(bucket.num_summed - self.rank * chunk, 0), chunk)
        return fold_in_blocks(self.num_slots, pieces, summed)

    def gather(self, i: int, total: Tensor, result: Tensor, *, is_async: bool) -> Work:
        """Phase 3: everybody's chunk into ``result``."""
        group = self.group
        assert group is not None, "a worker alone gathers nothing"
        chunk = self.pool.layout.chunk(self.pool.layout.buckets[i], group.size)
        if not self.in_place and total.data_ptr() == result[self.rank * chunk :].data_ptr():
            total = total.clone()  # rank 0's sum lies inside the output of the gather, where not all may read it
        return group.all_gather_into_tensor(result[: chunk * group.size], total, async_op=is_async)


class BucketSums:
    """The sums of one step, bucket by bucket: ``send`` what is ready, then ``finish``. With ``is_async`` nothing waits
    for others but for a bucket that was sent before the last one."""

    def __init__(self, reduction: Reduction, partials: Partials, *, is_async: bool) -> None:
        self._reduction = reduction
        self._partials = partials
        self._is_async = is_async
        self._waiting = reduction.pool.layout.send_order
        pieces = partials.pieces
        self._result = pieces[0][1] if pieces else reduction.pool.take()
        self._sent: SentBucket | None = None
        self._gathers: list[Work] = []

    @property
    def next(self) -> int:
        """Return the bucket to be sent now."""
        return self._waiting[0]

    def send(self) -> None:
        """Send the next bucket, which is complete in all pieces, and fold the one before it."""
        i = self._waiting.pop(0)
        sent = self._reduction.exchange(i, self._pieces(i), is_async=self._is_async)
        self._fold_last()
        self._sent = sent

    def finish(self) -> Flat:
        """Send the rest, wait for all, and return the root of the tree."""
        partials, reduction = self._partials, self._reduction
        own = [node for node, _ in partials.pieces]
        assert own == reduction.nodes[reduction.rank], "some slots are not finished"
        if reduction.is_alone:
            return partials.pieces.pop()[1]
        while self._waiting:
            self.send()
        self._fold_last()
        for work in self._gathers:
            work.wait()
        if partials.pieces:
            partials.pieces.pop(0)
        partials.drop()
        return self._result

    def _pieces(self, i: int) -> list[Tensor]:
        return [flat.tensors[i] for _, flat in self._partials.pieces]

    def _fold_last(self) -> None:
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        sent.work.wait()
        i = sent.bucket
        if self._reduction.watch is not None:
            self._reduction.watch.received(sent.received, self._reduction.rank)
        total = self._reduction.fold_own(i, self._pieces(i), sent.received)
        self._gathers.append(self._reduction.gather(i, total, self._result.tensors[i], is_async=self._is_async))


def fold_in_blocks(num_slots: int, pieces: dict[Node, Tensor], summed: int) -> Tensor:
    """Fold the first ``summed`` elements in place; the root is the leftmost piece, whose rest stays as it is."""
    for start in range(0, summed, BLOCK):
        block = slice(start, min(start + BLOCK, summed))
        fold(num_slots, {node: piece[block] for node, piece in pieces.items()}, lambda a, b: a.add_(b))
    return pieces[min(pieces)]
