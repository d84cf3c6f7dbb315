"""Goes once over a replica's share: indices out of blocks, and an exact count of what was taken.

Owns the speed of iteration. Indices are drawn in vectorised blocks and handed out by C code
(a chain of list iterators), with no Python per index. How many were taken is not counted
but read off: a list iterator tells how much of it is left.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator

from phalanx.data._partition import Share
from phalanx.data._permutation import Indices

#: Blocks grow from the first size, for a quick first index, to the last, for speed in few hundred KB.
FIRST_BLOCK, LAST_BLOCK = 64, 8192


class Cursor:
    """Where a pass stands. ``share`` may be replaced in the middle of it; then the pass goes on there."""

    def __init__(self, share: Share, draw: Callable[[Indices], list[int]]) -> None:
        self.share = share
        self.finished = False
        self._draw = draw
        self._drawn = 0
        self._block: Iterator[int] = iter(())
        self._closed = ""

    @property
    def taken(self) -> int:
        """How many indices of the share the consumer has taken."""
        return self._drawn - operator.length_hint(self._block)

    @property
    def rounds_done(self) -> int:
        """As ``taken``, but a replica that ended early, with less than others, has done all rounds."""
        return self.share.rounds if self.finished else self.taken

    def position_after(self, consumed: int | None) -> int:
        """Return how many positions of the epoch are done, if ``consumed`` of the taken (None: all) were used."""
        if consumed is None and self.finished:
            return self.share.length
        return self.share.position_after(self.taken if consumed is None else consumed)

    def move(self, share: Share) -> None:
        """Go on with another share; what was drawn but not taken is forgotten."""
        self._forget_block()
        self.share, self._drawn = share, 0

    def close(self, reason: str) -> None:
        """Make the next index an error: this pass must not go on."""
        self._forget_block()
        self._closed = reason

    def _forget_block(self) -> None:
        deque(self._block, maxlen=0)

    def blocks(self) -> Iterator[Iterator[int]]:
        """Yield the indices of the pass, to be chained by the consumer."""
        size = FIRST_BLOCK
        while True:
            if self._closed:
                raise RuntimeError(self._closed)
            stop = min(self._drawn + size, self.share.count)
            if stop <= self._drawn:
                self.finished = True
                return
            block = self._draw(self.share.positions(self._drawn, stop))
            self._block, self._drawn = iter(block), stop
            yield self._block
            size = min(2 * size, LAST_BLOCK)
