"""What a worker was doing, read from the text that ``faulthandler`` wrote for it.

Owns the reading, as pure functions. Only the thread that took the signal counts, which is the main thread unless a
program blocks signals in it: other threads of a healthy worker wait for something all day long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FRAME = re.compile(r'^ +File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_COLLECTIVES = ("/torch/distributed/", "/phalanx/comm/")
"""Where the code lies that waits for other ranks."""


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.path.rpartition('/')[2]}:{self.line})"


def frames_of(dump: str) -> list[Frame]:
    """The frames of the thread that wrote the dump, the innermost first.

    >>> text = 'Thread 0x1:\\n  File "/a.py", line 1 in other\\n\\nCurrent thread 0x2 (most recent call first):\\n'
    >>> [str(frame) for frame in frames_of(text + '  File "/w/train.py", line 7 in step\\n')]
    ['step (train.py:7)']
    """
    own = dump.rpartition("Current thread ")[2].partition("\n\n")[0]
    found = [_FRAME.match(line) for line in own.splitlines()]
    return [Frame(m["path"], int(m["line"]), m["function"]) for m in found if m]


def is_in_collective(frames: list[Frame]) -> bool:
    """Whether a worker waits for others: some frame belongs to the code that talks to other ranks."""
    return any(part in frame.path for frame in frames for part in _COLLECTIVES)
