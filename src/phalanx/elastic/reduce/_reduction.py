"""Completes the slot tree across workers: two collectives per dtype and step, none for a worker alone.

Phases, for each bucket cut into one chunk per worker:
1. all_to_all: every worker sends, to the owner of each chunk, that chunk of all its pieces.
2. The owner folds the pieces of all workers along the tree, in blocks that fit the cache.
3. all_gather: every worker receives all finished chunks.

On one host pieces and sums lie in shared memory: collectives read them where they are, nothing is copied in.

Owns the plan of one group (who sends how many pieces) and its receive buffers. Changes nothing but the flats it is
given: when a collective fails, the step can be dropped as if it had never begun.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.elastic.reduce._flat_layout import Bucket, Flat
from phalanx.elastic.reduce._partials import Partials, Pool
from phalanx.elastic.reduce._slots import Node, cover, fold, slot_range

BLOCK = 65536
"""Elements that are folded at a time: 256 KB of float32."""


class Reduction:
    """The reduction of one group; ``group`` is None for a worker alone."""

    def __init__(self, group: Group | None, num_slots: int, pool: Pool) -> None:
        self.group = group
        self.num_slots = num_slots
        self.pool = pool
        self.in_place = pool.use(group)
        size, self.rank = (group.size, group.rank) if group is not None else (1, 0)
        if size > pool.max_size:
            raise ValueError(f"{size} workers; this job was laid out for at most {pool.max_size}")
        self.slots = slot_range(num_slots, size, self.rank)
        self.nodes = [cover(num_slots, slot_range(num_slots, size, rank)) for rank in range(size)]
        self.received = [self._receive_buffers(bucket) for bucket in pool.layout.buckets]

    def reduce(self, partials: Partials) -> Flat:
        """Return the root of the tree. Takes the pieces of ``partials``; give the result back to the pool when done."""
        assert [node for node, _ in partials.pieces] == self.nodes[self.rank], "some slots are not finished"
        if self.group is None or self.group.size == 1:
            return partials.pieces.pop()[1]
        result = partials.pieces[0][1] if partials.pieces else self.pool.take()
        for i, bucket in enumerate(self.pool.layout.buckets):
            self._reduce_bucket(self.group, i, bucket, partials, result)
        if partials.pieces:
            partials.pieces.pop(0)
        partials.drop()
        return result

    def _receive_buffers(self, bucket: Bucket) -> list[Tensor]:
        if self.group is None or self.group.size == 1:
            return []
        chunk = self.pool.layout.chunk(bucket, self.group.size)
        counts = [len(nodes) if rank != self.rank else 0 for rank, nodes in enumerate(self.nodes)]
        return [self.pool.zeros(count * chunk, bucket.dtype) for count in counts]

    def _reduce_bucket(self, group: Group, i: int, bucket: Bucket, partials: Partials, result: Flat) -> None:
        chunk = self.pool.layout.chunk(bucket, group.size)
        mine = [flat.tensors[i] for _, flat in partials.pieces]
        outgoing = []
        for owner in range(group.size):
            parts = [tensor[owner * chunk : (owner + 1) * chunk] for tensor in mine]
            if owner == self.rank or not parts:
                outgoing.append(torch.empty(0, dtype=bucket.dtype, device=self.pool.layout.device))
            else:
                outgoing.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        received = list(self.received[i])
        if self.in_place and len(mine) == 1:
            # One piece, sent from where it lies: the chunks must follow each other, so this worker's own, which moves
            # from itself to itself, is among them.
            own = mine[0][self.rank * chunk : (self.rank + 1) * chunk]
            outgoing[self.rank] = received[self.rank] = own
        group.all_to_all(received, outgoing)
        pieces: dict[Node, Tensor] = {}
        for rank, nodes in enumerate(self.nodes):
            for k, node in enumerate(nodes):
                if rank == self.rank:
                    pieces[node] = mine[k][self.rank * chunk : (self.rank + 1) * chunk]
                else:
                    pieces[node] = received[rank][k * chunk : (k + 1) * chunk]
        summed = min(max(bucket.num_summed - self.rank * chunk, 0), chunk)
        total = fold_in_blocks(self.num_slots, pieces, summed)
        if not self.in_place and total.data_ptr() == result.tensors[i][self.rank * chunk :].data_ptr():
            total = total.clone()  # rank 0's sum lies inside the output of the gather, where not all may read it
        group.all_gather_into_tensor(result.tensors[i][: chunk * group.size], total)


def fold_in_blocks(num_slots: int, pieces: dict[Node, Tensor], summed: int) -> Tensor:
    """Fold the first ``summed`` elements in place; the root is the leftmost piece, whose rest stays as it is."""
    for start in range(0, summed, BLOCK):
        block = slice(start, min(start + BLOCK, summed))
        fold(num_slots, {node: piece[block] for node, piece in pieces.items()}, lambda a, b: a.add_(b))
    return pieces[min(pieces)]
