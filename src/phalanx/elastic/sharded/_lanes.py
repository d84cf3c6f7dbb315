"""Says which workers of a round compute together when a model is tensor parallel. Pure values only.

A worker has a *lane* for life: its place along the mesh's axis, hence which shard of every matrix it works on. A
*tensor parallel group* is one worker of each lane; it carries slots as one worker does where there are no lanes. Groups
are formed anew in every round from those who are there: on one node where possible, in the order of ranks. Who finds no
group (its lane has more workers than another) holds cells of its lane, takes part in everything, and carries no slot.

Invariant: everybody computes the same groups from the same lists. The bits do not depend on them: workers of a lane
hold the same shards, and slots are computed alike by all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lanes:
    """A round's workers, by rank in it."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks of each group, by lane."""
    members: tuple[tuple[int, ...], ...]
    """The ranks of each lane: first those in groups, in the order of the groups."""

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that this one computes with; None if it finds nobody."""
        return next((group for group in self.groups if rank in group), None)


def arrange(lanes: Sequence[int], nodes: Sequence[str], num_lanes: int) -> Lanes:
    """Form groups from the lane and the node of each rank.

    >>> arrange([0, 1, 0, 1], ["n", "n", "n", "n"], 2).groups
    ((0, 1), (2, 3))
    >>> after_a_loss = arrange([1, 0, 1], ["n", "n", "n"], 2)
    >>> after_a_loss.groups, after_a_loss.members
    (((1, 0),), ((1,), (0, 2)))
    >>> arrange([0, 1, 0, 1, 0, 1], ["a", "b", "b", "c", "c", "a"], 2).groups      # on one node where possible
    ((0, 5), (2, 1), (4, 3))
    """
    groups: list[tuple[int, ...]] = []
    free = list(range(len(lanes)))

    def form(among: Sequence[int]) -> None:
        by_lane = [[rank for rank in among if lanes[rank] == lane] for lane in range(num_lanes)]
        for group in zip(*by_lane, strict=False):
            groups.append(group)
            for rank in group:
                free.remove(rank)

    for node in dict.fromkeys(nodes):
        form([rank for rank in free if nodes[rank] == node])
    form(list(free))
    members = [[group[lane] for group in groups] for lane in range(num_lanes)]
    for rank in free:
        members[lanes[rank]].append(rank)
    return Lanes(tuple(groups), tuple(map(tuple, members)))
