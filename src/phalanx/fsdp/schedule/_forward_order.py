"""ForwardOrder: in which order units ran their forward the last time, so that the next can be gathered early.

Pure bookkeeping. Nothing is known in the first pass of a root; from the second on, ``next_after`` says what came next
last time, until a pass goes another way: then it says nothing more, and the new way is what is known afterwards. All
ranks run units in one order (which is checked where they communicate), so all say the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

S = TypeVar("S")


class ForwardOrder(Generic[S]):
    """The order of passes by kind: root, with or without grad.

    >>> order = ForwardOrder[str]()
    >>> order.begin("train"); [order.next_after(unit) for unit in "abc"]; order.end()
    [None, None, None]
    >>> order.begin("train"); [order.next_after(unit) for unit in "abdc"]; order.end()
    ['b', 'c', None, None]
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[S]] = {}
        self._kind: Hashable = None
        self._now: list[S] = []
        self._expected: list[S] = []

    def begin(self, kind: Hashable) -> None:
        """Begin a pass; one that was left unfinished is forgotten."""
        self._kind, self._now = kind, []
        self._expected = self._known.get(kind, [])

    def next_after(self, unit: S) -> S | None:
        """Note that ``unit`` runs, and return which one ran after it."""
        position = len(self._now)
        self._now.append(unit)
        if self._expected[position : position + 1] != [unit]:
            self._expected = []
        following = self._expected[position + 1 : position + 2]
        return following[0] if following else None

    def end(self) -> None:
        """Remember the order of this pass."""
        self._known[self._kind] = self._now
        self._now, self._expected = [], []
