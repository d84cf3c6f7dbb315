"""Chooses which nodes are in a generation and at which rank: pure functions.

Owns the choice when more nodes wait than fit, and the ranks. Invariants: a survivor is never displaced by a
newcomer; a survivor keeps its rank whenever that rank still exists; vacant ranks go to newcomers of the same
host, then of the same topology, then in natural order (``node2`` before ``node10``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from phalanx.protocol import MemberNode, NodeRecord

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


def choose(ready: Iterable[NodeRecord], previous: Sequence[MemberNode], max_nodes: int) -> list[NodeRecord]:
    """At most ``max_nodes`` of those that are ready: survivors first, then in the order of arrival.

    Of several that claim one fixed rank, the one that came first is taken.
    """
    survivors = {member.id: rank for rank, member in enumerate(previous)}
    last = len(survivors)
    ordered = sorted(ready, key=lambda node: (survivors.get(node.id, last), node.ticket))
    if any(node.fixed_rank >= 0 for node in ordered):
        by_rank: dict[int, NodeRecord] = {}
        for node in ordered:
            by_rank.setdefault(node.fixed_rank, node)
        ordered = list(by_rank.values())
    return ordered[:max_nodes]


def assign_ranks(chosen: Sequence[NodeRecord], previous: Sequence[MemberNode]) -> tuple[MemberNode, ...]:
    """Return the chosen nodes in the order of their ranks."""
    if any(node.fixed_rank >= 0 for node in chosen):
        return tuple(MemberNode.of(node) for node in sorted(chosen, key=lambda node: node.fixed_rank))
    size = len(chosen)
    old_rank = {member.id: rank for rank, member in enumerate(previous)}
    ranked: list[NodeRecord | None] = [None] * size
    homeless = []
    for node in chosen:
        rank = old_rank.get(node.id, size)
        if rank < size:
            ranked[rank] = node
        else:
            homeless.append(node)
    _fill(ranked, sorted(homeless, key=node_order), previous)
    return tuple(MemberNode.of(node) for node in ranked if node is not None)


def _fill(ranked: list[NodeRecord | None], homeless: list[NodeRecord], previous: Sequence[MemberNode]) -> None:
    """Give every vacant rank a node: three passes, from the best match of its previous holder to any."""
    matches: list[Callable[[NodeRecord, MemberNode], bool]] = [
        lambda node, member: node.host == member.host,
        lambda node, member: node.topology == member.topology != "",
    ]
    for matching in matches:
        for rank, member in enumerate(previous[: len(ranked)]):
            found = next((node for node in homeless if ranked[rank] is None and matching(node, member)), None)
            if found is not None:
                ranked[rank] = found
                homeless.remove(found)
    rest = iter(homeless)
    for rank, node in enumerate(ranked):
        ranked[rank] = next(rest) if node is None else node
