"""Sends the reduced gradient of every cell from its owner to its mirrors: one all-to-all for each dtype.

Mirrors repeat the update from it (4 bytes an element, where parameter and optimizer state are 12), so after it each
holder is prepared: it can make the step whoever is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx._torch_private import foreach_copy_
from phalanx.comm import Group
from phalanx.elastic.sharded._cell_store import CellStore, HeldSection
from phalanx.elastic.sharded._slot_reduction import MessageKinds, Messages
from phalanx.fsdp.layout._unit_layout import Range, intersect


def spread_gradients(store: CellStore, group: Group, messages: MessageKinds | None = None) -> None:
    """Fill the gradient buffers of all sections, on all holders alike; ``messages`` sees what travels."""
    for held in store.sections.values():
        _take_own(held, group.rank)
    if group.size == 1:
        return
    seen = None if messages is None else messages.of("reduced gradients for a mirror")
    for dtype, routes in store.plan("mirrors", lambda: _routes(store, group)):
        _exchange(dtype, routes, group, seen)


def _take_own(held: HeldSection, rank: int) -> None:
    root, at = held.sums.root(), 0
    for begin, end in held.owned:
        start, stop = held.layout.local_span(rank, begin, end)
        held.grad[start:stop].copy_(root[at : at + end - begin])
        at += end - begin


@dataclass(frozen=True)
class MirrorRoute:
    """What this worker sends to one other, which mirrors it, and what it gets from there: places in gradients."""

    sent: tuple[tuple[HeldSection, Range], ...]
    received: tuple[tuple[HeldSection, Range], ...]

    @property
    def num_received(self) -> int:
        return sum(stop - start for _, (start, stop) in self.received)


def _routes(store: CellStore, group: Group) -> list[tuple[torch.dtype, list[MirrorRoute]]]:
    """Return by dtype the routes to all ranks, for those dtypes of which there are mirrors."""
    by_dtype: dict[torch.dtype, list[HeldSection]] = {}
    for held in store.sections.values():
        by_dtype.setdefault(held.grad.dtype, []).append(held)
    me = group.rank
    return [
        (
            dtype,
            [MirrorRoute(*(_spans(sections, *pair, of=me) for pair in ((me, r), (r, me)))) for r in range(group.size)],
        )
        for dtype, sections in by_dtype.items()
        if any(held.layout.has_copies for held in sections)
    ]


def _spans(sections: list[HeldSection], owner: int, holder: int, *, of: int) -> tuple[tuple[HeldSection, Range], ...]:
    """Return where rank ``of`` keeps what ``owner`` owns and ``holder`` holds too."""
    if owner == holder:
        return ()
    return tuple(
        (held, held.layout.local_span(of, begin, end))
        for held in sections
        for begin, end in intersect(held.layout.owned[owner], held.layout.held[holder])
    )


def _exchange(dtype: torch.dtype, routes: list[MirrorRoute], group: Group, messages: Messages | None) -> None:
    sent = [_packed([held.grad[slice(*span)] for held, span in route.sent], dtype) for route in routes]
    received = [torch.empty(route.num_received, dtype=dtype) for route in routes]
    if messages is not None:
        messages.sent(sent, group.rank)
    group.all_to_all(received, sent)
    if messages is not None:
        messages.received(received, group.rank)
    places = [held.grad[slice(*span)] for route in routes for held, span in route.received]
    sizes = [part.numel() for part in places]
    if places:
        foreach_copy_(places, list(torch.cat(received).split(sizes)))


def _packed(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
