"""Chooses which nodes are in a generation and at which rank: pure functions.

Owns the choice when more nodes wait than fit, and the ranks. Invariants: a survivor is never displaced by a
newcomer; a survivor keeps its rank whenever that rank still exists; vacant ranks go to newcomers of the same
host, then of the same topology, then in natural order (``node2`` before ``node10``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from phalanx.launch.rendezvous._records import NodeRecord, Seat

_DIGITS = re.compile(r"(\d+)")


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key under which runs of digits compare as numbers.

    >>> sorted(["node10", "node2"], key=natural)
    ['node2', 'node10']
    """
    parts = _DIGITS.split(text)
    return tuple((0, int(part)) if i % 2 else (1, part) for i, part in enumerate(parts) if part)


def node_order(node: NodeRecord) -> tuple[object, ...]:
    """Topology first, then host, then arrival."""
    return (natural(node.topology), natural(node.host), node.ticket)


def choose(ready: Iterable[NodeRecord], previous: Sequence[Seat], max_nodes: int) -> list[NodeRecord]:
    """At most ``max_nodes`` of those that are ready: survivors first, then in the order of arrival.

    Of several that claim one fixed rank, the one that came first is taken.
    """
    survivors = {seat.id: rank for rank, seat in enumerate(previous)}
    last = len(survivors)
    ordered = sorted(ready, key=lambda node: (survivors.get(node.id, last), node.ticket))
    if any(node.fixed_rank >= 0 for node in ordered):
        by_rank: dict[int, NodeRecord] = {}
        for node in ordered:
            by_rank.setdefault(node.fixed_rank, node)
        ordered = list(by_rank.values())
    return ordered[:max_nodes]


def assign_ranks(chosen: Sequence[NodeRecord], previous: Sequence[Seat]) -> tuple[Seat, ...]:
    """Return the chosen nodes in the order of their ranks."""
    if any(node.fixed_rank >= 0 for node in chosen):
        return tuple(Seat.of(node) for node in sorted(chosen, key=lambda node: node.fixed_rank))
    size = len(chosen)
    old_rank = {seat.id: rank for rank, seat in enumerate(previous)}
    seats: list[NodeRecord | None] = [None] * size
    homeless = []
    for node in chosen:
        rank = old_rank.get(node.id, size)
        if rank < size:
            seats[rank] = node
        else:
            homeless.append(node)
    _fill(seats, sorted(homeless, key=node_order), previous)
    return tuple(Seat.of(node) for node in seats if node is not None)


def _fill(seats: list[NodeRecord | None], homeless: list[NodeRecord], previous: Sequence[Seat]) -> None:
    """Give every vacant rank a node: three passes, from the best match of its previous holder to any."""
    matches: list[Callable[[NodeRecord, Seat], bool]] = [
        lambda node, seat: node.host == seat.host,
        lambda node, seat: node.topology == seat.topology != "",
    ]
    for matching in matches:
        for rank, seat in enumerate(previous[: len(seats)]):
            found = next((node for node in homeless if seats[rank] is None and matching(node, seat)), None)
            if found is not None:
                seats[rank] = found
                homeless.remove(found)
    rest = iter(homeless)
    for rank, node in enumerate(seats):
        seats[rank] = next(rest) if node is None else node
