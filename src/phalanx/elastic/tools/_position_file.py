"""Keeps what a worker computes in a file, so that its agent can name it however the worker dies.

Owns one line at the beginning of one file, written in place: what the kernel has taken is there after any death of the
process. A disk that does not take it is no reason to fail: then nothing is known, as without an agent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from phalanx.protocol import VERSION

MAX_NAMED = 16
"""How many samples are named before they are only counted."""


def position_line(step: int, slot: int, samples: str) -> bytes:
    """Return the record as ``WorkPosition.to_json`` does, several times as fast: it is written twice for every slot.

    >>> from phalanx.protocol import WorkPosition
    >>> position_line(3, 1, "7, 8") == WorkPosition(step=3, slot=1, samples="7, 8").to_json() + b"\\n"
    True
    """
    return b'{"v":%d,"step":%d,"slot":%d,"samples":"%s"}\n' % (VERSION, step, slot, samples.encode())


class PositionFile:
    def __init__(self, path: str) -> None:
        self._fd = -1
        if path:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                pass  # told by others: logs lie on the same disk

    def note(self, step: int, slot: int = -1, samples: Sequence[int] = ()) -> None:
        """Note what is computed from now on; without a slot: nothing that belongs to one."""
        if self._fd < 0:
            return
        named = ", ".join(map(str, samples[:MAX_NAMED]))
        if len(samples) > MAX_NAMED:
            named += f" and {len(samples) - MAX_NAMED} more"
        try:
            os.pwrite(self._fd, position_line(step, slot, named), 0)
        except OSError:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
