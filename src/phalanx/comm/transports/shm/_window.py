"""Works this rank's end of the slots: puts a piece, says so, sees that the others' are there, says they are read.

The order of every step, on every rank (see ``_segment_layout`` for the flags)::

    while token := window.busy(n): yield token       # my slot of step n is still being read
    window.put(n, address, nbytes)                   # or write the slot's views directly
    window.post(n)                                   # READY = n
    while token := window.missing(n): yield token    # the others' READY >= n
    ... read the slots ...
    window.took(n)                                   # TAKEN = n

A rank that does not read may skip the waiting, one that does not write may skip the putting; both still post and take,
so that numbers stay in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm._calls import describe
from phalanx.comm.transports.shm._engine import Engine
from phalanx.comm.transports.shm._segment_layout import TOKEN_SHIFT
from phalanx.comm.transports.shm._streaming_copy import Copy
from phalanx.comm.transports.shm._syscalls import copy_bytes, fence
from phalanx.errors import CollectiveMismatch

_KEPT_VIEWS = 64
_HISTORY_MASK = (1 << 62) - 1


class Window:
    """Slots and flags of one group as one rank sees them."""

    def __init__(self, engine: Engine) -> None:
        segment = engine.segment
        layout = segment.layout
        self.engine = engine
        self.layout = layout
        self.rank, self.size = segment.rank, layout.size
        self.slots, self.slot_bytes = layout.slots, layout.slot_bytes
        self.piece_bytes = layout.slot_bytes // layout.size // 64 * 64
        """What one of ``size`` parts of a slot holds."""
        self.peers = [r for r in range(layout.size) if r != segment.rank]
        self.addresses = [
            [segment.address + layout.slot(r, k) for k in range(layout.slots)] for r in range(layout.size)
        ]
        self._step = 0
        self._history = 0
        self._words = segment.words
        blocks = [layout.block(r) for r in range(layout.size)]
        self._blocks = blocks
        self._ready, self._taken = blocks[self.rank] + L.READY, blocks[self.rank] + L.TAKEN
        self._ready_of = [blocks[r] + L.READY for r in self.peers]
        self._taken_of = [blocks[r] + L.TAKEN for r in self.peers]
        self._bytes = torch.frombuffer(segment.mapping.memory, dtype=torch.uint8)
        self._views: dict[tuple[torch.dtype, int, int], list[list[Tensor]]] = {}

    def claim(self, count: int = 1) -> int:
        """Return the number of the next step; ``count`` steps are this collective's."""
        first = self._step + 1
        self._step += count
        return first

    def busy(self, n: int) -> int:
        """0 when my slot of step n may be written, else the token to wait for."""
        words, target = self._words, n - self.slots
        for index in self._taken_of:
            if words[index] < target:
                return target << TOKEN_SHIFT | index
        return 0

    def put(self, n: int, address: int, nbytes: int, offset: int = 0) -> None:
        copy_bytes(self.addresses[self.rank][n % self.slots] + offset, address, nbytes)

    def get(self, n: int, rank: int, address: int, nbytes: int, offset: int = 0, copy: Copy = copy_bytes) -> None:
        copy(address, self.addresses[rank][n % self.slots] + offset, nbytes)

    def post(self, n: int, call: int = 0, *details: int) -> None:
        """READY = n. The first step of a collective carries its record, which the others check."""
        if call:
            words = self._words
            at = self._blocks[self.rank] + L.CALLS + n % self.slots * L.CALL_WORDS
            words[at] = call
            words[at + L.HISTORY] = self._history = (self._history * 31 + call) & _HISTORY_MASK
            for detail in details:
                at += 1
                words[at] = detail
        self.engine.raise_flag(self._ready, n)

    def missing(self, n: int) -> int:
        """0 when every peer has posted step n, else the token to wait for."""
        words = self._words
        for index in self._ready_of:
            if words[index] < n:
                return n << TOKEN_SHIFT | index
        if fence is not None:
            fence()
        return 0

    def missing_from(self, n: int, rank: int) -> int:
        """0 when ``rank`` has posted step n, else the token to wait for."""
        index = self._blocks[rank] + L.READY
        if self._words[index] < n:
            return n << TOKEN_SHIFT | index
        if fence is not None:
            fence()
        return 0

    def took(self, n: int) -> None:
        self.engine.raise_flag(self._taken, n)

    def detail(self, n: int, rank: int, number: int) -> int:
        """Detail ``number`` (from 1) of the record that ``rank`` posted with step n."""
        return self._words[self._blocks[rank] + L.CALLS + n % self.slots * L.CALL_WORDS + number]

    def check(self, n: int, call: int, ranks: Sequence[int] | None = None) -> None:
        """``CollectiveMismatch`` unless these ranks (default: all peers) are in the same collective."""
        words, at, history = self._words, L.CALLS + n % self.slots * L.CALL_WORDS, self._history
        for rank in self.peers if ranks is None else ranks:
            record = self._blocks[rank] + at
            if words[record] != call:
                raise CollectiveMismatch(
                    f"rank {self.rank} called {describe(call)} but rank {rank} called {describe(words[record])}; "
                    "every rank must call the same collectives in the same order with matching tensors"
                )
            if words[record + L.HISTORY] != history:
                raise CollectiveMismatch(
                    f"rank {self.rank} and rank {rank} both called {describe(call)} now, but something else before; "
                    "every rank must call the same collectives in the same order with matching tensors"
                )

    def write_sizes(self, n: int, sizes: Sequence[int]) -> None:
        at = self._blocks[self.rank] + self.layout.sizes_word + n % self.slots * self.size
        for i, size in enumerate(sizes):
            self._words[at + i] = size

    def size_for(self, n: int, rank: int, dst: int) -> int:
        """Return how many bytes ``rank`` said, with step n, that it has for ``dst``."""
        return self._words[self._blocks[rank] + self.layout.sizes_word + n % self.slots * self.size + dst]

    def views(self, n: int, dtype: torch.dtype, count: int, offset: int = 0) -> list[Tensor]:
        """Return every rank's slot of step n, from byte ``offset``, as ``count`` elements."""
        key = (dtype, count, offset)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            found = self._views[key] = [
                [self._view(rank, slot, dtype, count, offset) for rank in range(self.size)]
                for slot in range(self.slots)
            ]
        return found[n % self.slots]

    def _view(self, rank: int, slot: int, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        start = self.layout.slot(rank, slot) + offset
        return self._bytes[start : start + count * dtype.itemsize].view(dtype)

    def forget_views(self) -> None:
        """Let go of the mapping, so that it is unmapped."""
        self._views.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)
