"""Sums the gradients inside one worker: finished subtrees of the slot tree, kept like a binary counter.

A finished slot is pushed; as long as the two topmost pieces are siblings, the right one is added to the left one.
So at most log2(num_slots) + 1 copies of the gradients exist, and what remains at the end is exactly ``cover`` of the
worker's slots. Copies come from a pool that lives as long as the job.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx._torch_private import foreach_add_, foreach_copy_
from phalanx.comm import Group
from phalanx.elastic.reduce._flat_layout import SCALARS, Flat, FlatLayout
from phalanx.elastic.reduce._slots import Node, siblings


class Pool:
    """Flats that are not in use; the job never frees them."""

    def __init__(self, layout: FlatLayout, max_size: int) -> None:
        self.layout = layout
        self.max_size = max_size
        """Into how many chunks the copies can be cut: of how many workers a group may be. See ``fit``."""
        self.free: list[Flat] = []
        self.num_made = 0
        self.group: Group | None = None

    def use(self, group: Group | None) -> bool:
        """Make copies where ``group``'s collectives work on them in place; whether there is such a place.

        Shared memory outlives the group it was made for, so copies go from one group to the next.
        """
        if group is None or group.backend != "shm" or not is_host(self.layout.device):
            self.group = None
            return False
        if self.group is None:
            self.free.clear()  # those in private memory
        self.group = group
        return True

    def fit(self, size: int) -> None:
        """Make copies from now on that a group of ``size`` workers can cut into as many chunks; smaller ones go."""
        if size > self.max_size:
            self.max_size = max(size, 2 * self.max_size)
            self.free.clear()

    def take(self) -> Flat:
        if self.free:
            return self.free.pop()
        self.num_made += 1
        return Flat(self.layout, self.max_size, self.zeros)

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self.empty(count, dtype).zero_()

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Shared memory where the group works on it in place, else private memory on the model's device."""
        if self.group is None:
            return torch.empty(count, dtype=dtype, device=self.layout.device)
        return self.group.shared_empty((count,), dtype)

    def give(self, flat: Flat) -> None:
        if flat.max_size >= self.max_size:
            self.free.append(flat)


class Partials:
    """The pieces of one step on one worker."""

    def __init__(self, pool: Pool, num_slots: int) -> None:
        self.pool = pool
        self.siblings = siblings(num_slots)
        self.pieces: list[tuple[Node, Flat]] = []

    def push(
        self,
        slot: int,
        grads: Sequence[Tensor | None],
        scalars: dict[str, float],
        buffers: Sequence[Tensor] | None = None,
        note: int = 0,
    ) -> None:
        """Take in a finished slot: its gradients (None where a parameter was not used), numbers, buffers and note."""
        self.begin(slot).finish(grads, scalars, buffers, note)

    def begin(self, slot: int) -> Push:
        """Begin to take in a slot, bucket by bucket. From now on ``pieces`` are what they will be in the end; what a
        bucket of them holds counts once it is put."""
        return Push(self, slot)

    def drop(self) -> None:
        """Forget the step; the copies go back to the pool."""
        for _, flat in self.pieces:
            self.pool.give(flat)
        self.pieces.clear()

    def abandon(self) -> None:
        """Forget the step after a failed collective, which may still write into the copies: they are not used again."""
        self.pieces.clear()


class Push:
    """A slot on its way into the pieces: which copy it goes to, and which copies are then added to which."""

    def __init__(self, partials: Partials, slot: int) -> None:
        self._pool = partials.pool
        self._slot = slot
        self._is_put = [False] * len(self._pool.layout.buckets)
        node, pieces = (slot, slot + 1), partials.pieces
        self._adds = bool(pieces) and partials.siblings.get(node) == pieces[-1][0]
        if self._adds:
            left, flat = pieces.pop()
            node = (left[0], node[1])
        else:
            flat = self._pool.take()
        self._flat = flat
        self._carries: list[tuple[Flat, Flat]] = []
        while pieces and partials.siblings.get(node) == pieces[-1][0]:
            left, into = pieces.pop()
            self._carries.append((into, flat))
            node, flat = (left[0], node[1]), into
        pieces.append((node, flat))

    def put(self, i: int, grads: Sequence[Tensor | None]) -> None:
        """Take in one bucket's gradients, of those of all parameters."""
        bucket = self._pool.layout.buckets[i]
        into = [self._flat.grads[index] for index in bucket.params]
        (_add_grads if self._adds else _copy_grads)(into, [grads[index] for index in bucket.params])
        for a, b in self._carries:
            a.tensors[i][: bucket.num_summed].add_(b.tensors[i][: bucket.num_summed])
        self._is_put[i] = True

    def finish(
        self,
        grads: Sequence[Tensor | None],
        scalars: dict[str, float],
        buffers: Sequence[Tensor] | None = None,
        note: int = 0,
        times: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Take in what is not put yet, the first bucket last: what rides along is in it."""
        flat = self._flat
        values = [scalars.get(name, 0.0) for name in SCALARS] + [float(grad is not None) for grad in grads]
        numbers = torch.tensor(values, dtype=torch.float32, device=self._pool.layout.device)
        if self._adds:
            flat.numbers.add_(numbers)
        else:
            flat.numbers.copy_(numbers)
            flat.per_slot.zero_()
        if self._pool.layout.num_slots:
            flat.per_slot[:, self._slot] = torch.tensor([float(note), *times], device=self._pool.layout.device)
        if buffers is not None:
            flat.put_buffers(buffers)
        for i in self._pool.layout.send_order:
            if not self._is_put[i]:
                self.put(i, grads)
        for _, done in self._carries:
            self._pool.give(done)


def _copy_grads(into: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    present = [(a, grad) for a, grad in zip(into, grads, strict=True) if grad is not None]
    if present:
        foreach_copy_([a for a, _ in present], [grad for _, grad in present])
    for a, grad in zip(into, grads, strict=True):
        if grad is None:
            a.zero_()


def _add_grads(into: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    present = [(a, grad) for a, grad in zip(into, grads, strict=True) if grad is not None]
    if present:
        foreach_add_([a for a, _ in present], [grad for _, grad in present])
    for a, grad in zip(into, grads, strict=True):
        if grad is None:
            a.add_(0.0)  # not a no-op: -0.0 becomes 0.0, as it does when the zeros come from another worker
