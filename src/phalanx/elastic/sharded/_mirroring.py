"""Sends the reduced gradient of every cell from its owner to its mirrors: all-to-alls of some MB, each dtype by itself.

Mirrors repeat the update from it (4 bytes an element, where parameter and optimizer state are 12), so after it each
holder is prepared: it can make the step whoever is lost.

What is sent is packed into buffers of the units' pool, which nobody uses when all gradients are reduced: some MB at a
time fit into those, and new memory for all at once would cost more than the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx._torch_private import foreach_copy_
from phalanx.comm import Group
from phalanx.elastic.sharded._cell_store import CellStore, HeldSection
from phalanx.elastic.sharded._slot_reduction import MessageKinds, Messages
from phalanx.fsdp.layout._unit_layout import aligned, intersect
from phalanx.fsdp.unit._unit_memory import pool_of

PART_BYTES = 8 << 20
"""What a worker receives at once, about."""


def spread_gradients(store: CellStore, group: Group, messages: MessageKinds | None = None) -> None:
    """Fill the gradient buffers of all sections, on all holders alike; ``messages`` sees what travels."""
    for held in store.sections.values():
        _take_own(held, group.rank)
    if group.size == 1:
        return
    seen = None if messages is None else messages.of("reduced gradients for a mirror")
    for part in store.plan("mirrors", lambda: list(_parts(store, group))):
        _exchange(part, group, seen)


def _take_own(held: HeldSection, rank: int) -> None:
    root, at = held.sums.root(), 0
    if root is held.grad:
        return
    for begin, end in held.owned:
        start, stop = held.layout.local_span(rank, begin, end)
        held.grad[start:stop].copy_(root[at : at + end - begin])
        at += end - begin


@dataclass(frozen=True)
class Side:
    """What one all-to-all takes from gradients here, or brings to them: by the other's rank, where they lie."""

    places: tuple[tuple[Tensor, ...], ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, places: Sequence[Sequence[Tensor]]) -> Side:
        return cls(tuple(map(tuple, places)), tuple(sum(place.numel() for place in each) for each in places))

    @property
    def length(self) -> int:
        """Elements of a buffer for it."""
        return sum(map(aligned, self.counts))

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of a buffer by rank."""
        found, at = [], 0
        for count in self.counts:
            found.append(buffer[at : at + count])
            at += aligned(count)
        return found

    def copy(self, parts: Sequence[Tensor], *, packs: bool) -> None:
        """Copy from the gradients to the parts of a buffer, or back."""
        ours = [place for each in self.places for place in each]
        packed: list[Tensor] = []
        for part, each in zip(parts, self.places, strict=True):
            packed += part.split([place.numel() for place in each]) if each else ()
        if ours:
            foreach_copy_(packed, ours) if packs else foreach_copy_(ours, packed)


@dataclass(frozen=True)
class MirrorExchange:
    """One all-to-all."""

    dtype: torch.dtype
    device: torch.device
    sent: Side
    received: Side


def _parts(store: CellStore, group: Group) -> Iterator[MirrorExchange]:
    """Yield all-to-alls that together bring every gradient to its mirrors; as many on all ranks."""
    by_dtype: dict[torch.dtype, list[HeldSection]] = {}
    for held in store.sections.values():
        if held.layout.has_copies:
            by_dtype.setdefault(held.grad.dtype, []).append(held)
    me, ranks = group.rank, range(group.size)
    for dtype, sections in by_dtype.items():
        sent = [_places(sections, me, other, of=me) for other in ranks]
        received = [_places(sections, other, me, of=me) for other in ranks]
        most = max(sum(h.layout.num_held[rank] - h.layout.num_owned[rank] for h in sections) for rank in ranks)
        count = max(1, -(-most * dtype.itemsize // PART_BYTES))
        for number in range(count):
            sides = [Side.of([_cut(each, number, count) for each in side]) for side in (sent, received)]
            yield MirrorExchange(dtype, sections[0].grad.device, *sides)


def _places(sections: Sequence[HeldSection], owner: int, holder: int, *, of: int) -> list[Tensor]:
    """Return where rank ``of`` keeps the gradient of what ``owner`` owns and ``holder`` holds too."""
    if owner == holder:
        return []
    return [
        held.grad[slice(*held.layout.local_span(of, begin, end))]
        for held in sections
        for begin, end in intersect(held.layout.owned[owner], held.layout.held[holder])
    ]


def _cut(places: Sequence[Tensor], number: int, count: int) -> list[Tensor]:
    """Return one of so many even parts of places that count as one vector.

    >>> [[place.tolist() for place in _cut([torch.arange(3), torch.arange(3, 8)], n, 2)] for n in range(2)]
    [[[0, 1, 2], [3]], [[4, 5, 6, 7]]]
    """
    total = sum(place.numel() for place in places)
    begin, end = total * number // count, total * (number + 1) // count
    found, at = [], 0
    for place in places:
        start, stop = max(begin - at, 0), min(end - at, place.numel())
        if start < stop:
            found.append(place[start:stop])
        at += place.numel()
    return found


def _exchange(part: MirrorExchange, group: Group, messages: Messages | None) -> None:
    pool = pool_of(group)
    buffers = [pool.acquire(group, side.length, part.dtype, part.device) for side in (part.sent, part.received)]
    sent, received = part.sent.split(buffers[0]), part.received.split(buffers[1])
    part.sent.copy(sent, packs=True)
    if messages is not None:
        messages.sent(sent, group.rank)
    group.all_to_all(received, sent)
    if messages is not None:
        messages.received(received, group.rank)
    part.received.copy(received, packs=False)
    for buffer in buffers:
        pool.release(buffer)
