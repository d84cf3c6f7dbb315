"""Shows equal lines of many ranks as one on the console: ``ranks 1-7: ...``.

A line waits for a moment for its likes of other ranks. What one rank prints stays in its order: a line joins another
only behind the last one that its rank has joined. Pure, but for the clock that it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

HOLD = 0.15
"""Seconds that a line waits."""
MAX_HELD = 2000


@dataclass
class _HeldLine:
    number: int
    since: float
    fd: int
    line: bytes
    ranks: set[int] = field(default_factory=set)


class LineMerger:
    """Takes lines of ranks, gives lines for the console.

    >>> merger = LineMerger()
    >>> for rank in (0, 2, 1, 3):
    ...     merger.add(rank, 1, b"step 7", 0.0)
    >>> merger.add(0, 1, b"only here", 0.0)
    >>> [line for _, line in merger.due(1.0)]
    [b'ranks 0-3: step 7\\n', b'rank 0: only here\\n']
    """

    def __init__(self) -> None:
        self._held: deque[_HeldLine] = deque()
        self._by_line: dict[tuple[int, bytes], _HeldLine] = {}
        self._last: dict[int, int] = {}
        """By rank: the number of the last line that it has joined."""
        self._count = 0

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def add(self, rank: int, fd: int, line: bytes, now: float) -> None:
        """Take a line without its end, for a console's descriptor."""
        held = self._by_line.get((fd, line))
        if held is None or held.number <= self._last.get(rank, -1):
            held = _HeldLine(self._count, now, fd, line)
            self._count += 1
            self._held.append(held)
            self._by_line[fd, line] = held
        held.ranks.add(rank)
        self._last[rank] = held.number

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Return what has waited long enough, in order: descriptors, and lines with their ends."""
        found = []
        while self._held and (now - self._held[0].since >= HOLD or len(self._held) > MAX_HELD):
            held = self._held.popleft()
            if self._by_line.get((held.fd, held.line)) is held:
                del self._by_line[held.fd, held.line]
            found.append((held.fd, f"{name_ranks(held.ranks)}: ".encode() + held.line + b"\n"))
        return found


def name_ranks(ranks: Iterable[int]) -> str:
    """
    >>> name_ranks([3]), name_ranks([0, 1, 2, 5, 7, 8])
    ('rank 3', 'ranks 0-2,5,7-8')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {named}"
