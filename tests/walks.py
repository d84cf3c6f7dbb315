"""Records which files of the library run, one after the other, while something happens in this thread.

A walk is the list of files in the order in which their functions begin, or are returned to: what a reader who steps
through it has open. Its length is the number of changes from one file to another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import phalanx

_SOURCE = Path(phalanx.__file__).parent


class Walk:
    """The files of ``src/phalanx`` in the order in which they ran, each next to another one."""

    def __init__(self) -> None:
        self.files: list[str] = []

    @property
    def switches(self) -> int:
        """How often a reader turns from one file to another."""
        return max(0, len(self.files) - 1)

    def note(self, file: str) -> None:
        if not self.files or self.files[-1] != file:
            self.files.append(file)


def _file_of(frame: FrameType | None) -> str | None:
    """The nearest frame of the library, seen from ``frame``: callbacks of torch stand for whoever called torch."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(_SOURCE)):
            return str(Path(path).relative_to(_SOURCE))
        frame = frame.f_back
    return None


@contextmanager
def recorded(*, returns: bool = False) -> Iterator[Walk]:
    """Record the calling thread until the end of the block.

    ``returns``: count the way back as well, from a function that ends to the one that called it.
    """
    walk = Walk()
    prefix = str(_SOURCE)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if not frame.f_code.co_filename.startswith(prefix):
            return
        if event == "call":
            walk.note(str(Path(frame.f_code.co_filename).relative_to(_SOURCE)))
        elif event == "return" and returns:
            file = _file_of(frame.f_back)
            if file is not None:
                walk.note(file)

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(previous)
