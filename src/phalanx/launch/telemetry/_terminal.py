"""Keeps a live block of some lines at the bottom of a terminal, while everything else scrolls above it.

Owns the terminal as far as this process writes to it: what goes to the console passes through ``write``, which takes
the block away, writes, and puts it back. Plain control sequences; colours come from rich where it is installed. A
terminal that goes away is not an error.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ERASE_LINE = b"\r\x1b[2K"
_UP = b"\x1b[1A"


class Terminal:
    """The terminal behind a descriptor, mostly that of stderr."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._shown = b""
        self._at_line_start = True

    def show(self, text: str) -> None:
        """Show these lines at the bottom, in place of those before; "" takes them away."""
        width = shutil.get_terminal_size((120, 24)).columns
        block = b"\n".join(_coloured(line[: max(10, width - 1)]) for line in text.split("\n"))
        with self._lock:
            if block != self._shown:
                self._put(self._fd, self._erasing() + (block if self._at_line_start else b""))
                self._shown = block if self._at_line_start else b""

    def write(self, fd: int, data: bytes) -> OSError | None:
        """Write to the console, above the block; what the console says when it cannot."""
        with self._lock:
            shown, problem = self._shown, None
            if shown:
                self._put(self._fd, self._erasing())
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(fd, view) :]
            except OSError as error:
                problem = error
            self._at_line_start = data.endswith(b"\n")
            if shown and self._at_line_start:
                self._put(self._fd, shown)
            elif shown:
                self._shown = b""
            return problem

    def _erasing(self) -> bytes:
        """Return what takes the block away, line by line from its last one."""
        if not self._shown:
            return b""
        return _ERASE_LINE + (_UP + _ERASE_LINE) * self._shown.count(b"\n")

    @staticmethod
    def _put(fd: int, data: bytes) -> None:
        try:
            os.write(fd, data)
        except OSError:
            pass


class TerminalStream:
    """A text stream above the live block, for handlers of Python's logging."""

    def __init__(self, terminal: Terminal, fd: int) -> None:
        self._terminal = terminal
        self._fd = fd

    def write(self, text: str) -> int:
        """Write all of it."""
        self._terminal.write(self._fd, text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing waits here."""


@contextmanager
def logging_above(terminal: Terminal) -> Iterator[None]:
    """Have what this process logs to stderr written above the live block."""
    handlers: list[logging.StreamHandler[Any]] = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
    ]
    for handler in handlers:
        handler.setStream(TerminalStream(terminal, 2))
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(sys.stderr)


def _coloured(text: str) -> bytes:
    """Return the text in rich's colours for numbers and words, if rich is there."""
    if not text:
        return b""
    try:
        from rich.console import Console  # optional package; start-up
    except ImportError:
        return text.encode()
    console: Any = Console(force_terminal=True, width=len(text) + 10, color_system="standard")
    with console.capture() as capture:
        console.print(text, end="", markup=False, soft_wrap=True)
    made: str = capture.get()
    return made.encode()
