"""Says which worker carries which slots, and over which one binary tree their gradients are summed.

Pure values only. A job has ``num_slots`` logical ranks; a worker carries a contiguous range of them. Sums run over
a fixed tree whose leaves are the slots: a node over ``[lo, hi)`` has a left child of the largest power of two that
is smaller than ``hi - lo``. A worker reduces whole subtrees that lie inside its range (``cover``); whoever holds the
pieces of all workers completes the tree (``fold``).

Invariant: the additions, and which operand is left, depend on ``num_slots`` alone. So the sum has the same bits for
every way to spread the slots over workers. ``fold`` over single slots is the naive reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeVar

Node = tuple[int, int]
"""A subtree, as the range ``(lo, hi)`` of slots below it."""

T = TypeVar("T")


def slot_range(num_slots: int, size: int, rank: int) -> range:
    """Return the slots of one worker: contiguous, in the order of ranks, sizes at most one apart.

    >>> [list(slot_range(8, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}; expected at least 1")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is outside [0, {size})")
    return range(num_slots * rank // size, num_slots * (rank + 1) // size)


def children(node: Node) -> tuple[Node, Node]:
    """Return the two halves of a node with at least two slots.

    >>> children((0, 6)), children((4, 6))
    (((0, 4), (4, 6)), ((4, 5), (5, 6)))
    """
    lo, hi = node
    assert hi - lo > 1, f"{node} is a leaf and has no children"
    middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def cover(num_slots: int, slots: range) -> list[Node]:
    """Return the largest subtrees that lie wholly inside a range of slots, from left to right.

    >>> cover(8, range(2, 7))
    [(2, 4), (4, 6), (6, 7)]
    """

    def inside(node: Node) -> list[Node]:
        lo, hi = node
        if hi <= slots.start or slots.stop <= lo:
            return []
        if slots.start <= lo and hi <= slots.stop:
            return [node]
        left, right = children(node)
        return inside(left) + inside(right)

    return inside((0, num_slots))


def fold(num_slots: int, pieces: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Complete the tree from the pieces that ``cover`` names for all workers.

    >>> fold(3, {(0, 1): "a", (1, 2): "b", (2, 3): "c"}, lambda left, right: f"({left}+{right})")
    '((a+b)+c)'
    """

    def total(node: Node) -> T:
        if node in pieces:
            return pieces[node]
        if node[1] - node[0] == 1:
            raise ValueError(f"slot {node[0]} of {num_slots} is in no piece; got pieces {sorted(pieces)}")
        left, right = children(node)
        return add(total(left), total(right))

    return total((0, num_slots))


@lru_cache(maxsize=64)
def siblings(num_slots: int) -> dict[Node, Node]:
    """For each right child its left sibling: what a finished subtree is added to."""
    found: dict[Node, Node] = {}
    open_nodes: list[Node] = [(0, num_slots)]
    while open_nodes:
        node = open_nodes.pop()
        if node[1] - node[0] > 1:
            left, right = children(node)
            found[right] = left
            open_nodes += [left, right]
    return found
