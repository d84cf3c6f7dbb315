"""Moves what workers print: from their pipes to console, log files and filtered copies; keeps the last lines.

Owns one thread and the descriptors of all piped streams. A stream that only goes to a file, or to the console as it
is, never passes through here: the worker gets that descriptor itself. stderr always does (unless it goes to a file),
because the final report shows its last lines. A console or a disk that cannot take output any more is told once and
tried again with the next output: workers go on.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.comm import _background as background
from phalanx.comm._background import Background
from phalanx.launch.telemetry._line_merger import HOLD, LineMerger
from phalanx.launch.telemetry._terminal import Terminal

log = logging.getLogger(__name__)

_TAIL_BYTES = 8192
_CHUNK = 65536


@dataclass(kw_only=True)
class Sinks:
    """Says where the bytes of one stream go. ``console_fd`` or ``file_fd`` of -1: not there."""

    console_fd: int = -1
    file_fd: int = -1
    prefix: bytes = b""
    filters: tuple[bytes, ...] = ()
    filtered_path: str = ""
    num_lost: int = 0
    """Pieces of output that a log file did not take in a row."""
    rank: int = -1
    merger: LineMerger | None = None
    """Where equal lines of several ranks become one before they go to the console."""
    terminal: Terminal | None = None
    """The terminal behind the console, if it has a live line."""
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=64))
    partial: bytes = b""


class LogPump:
    """Moves streams: start it, then ``add`` them; ``drain`` before reading a tail; ``close`` in the end."""

    def __init__(self) -> None:
        self.merger = LineMerger()
        self.terminal: Terminal | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[tuple[int, Sinks]] = []
        self._drains: list[threading.Event] = []
        self._is_closing = False
        # Begun again for ever: workers stand still when nobody reads what they print.
        self._thread = Background(self._run, "phalanx-logs", on_failure=lambda error: None, attempts=background.FOREVER)

    def start(self) -> None:
        self._thread.start()

    def add(self, sinks: Sinks) -> int:
        """Return a descriptor for the worker to write to; the caller closes its copy once the worker has it."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(read_end, False)
        with self._lock:
            self._new.append((read_end, sinks))
        self._wake()
        return write_end

    def drain(self, timeout: float = 10.0) -> None:
        """Wait until everything that was in the pipes when this was called has been passed on."""
        if not self._thread.is_alive():
            return
        event = threading.Event()
        with self._lock:
            self._drains.append(event)
        self._wake()
        event.wait(timeout)

    def close(self) -> None:
        """Pass on what is left and stop."""
        if not self._thread.is_alive():
            if not self._thread.has_started:
                self._finish()
            return
        with self._lock:
            self._is_closing = True
        self._wake()
        self._thread.join(timeout=15)

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass

    def _run(self) -> None:
        while True:
            with self._lock:
                new, self._new = self._new, []
                drains, self._drains = self._drains, []
                is_closing = self._is_closing
            for fd, sinks in new:
                self._selector.register(fd, selectors.EVENT_READ, sinks)
            if drains or is_closing:
                while self._pass_on(self._selector.select(0)):
                    pass
                self._show_merged(float("inf"))
                for event in drains:
                    event.set()
            if is_closing:
                self._finish()
                return
            self._pass_on(self._selector.select(HOLD if self.merger.is_holding else None))
            self._show_merged(time.monotonic())

    def _show_merged(self, now: float) -> None:
        for fd, line in self.merger.due(now):
            _show(self.terminal, fd, line)

    def _pass_on(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> int:
        """Return how many worker streams had something."""
        moved = 0
        for key, _ in ready:
            if key.fileobj is self._wake_read:
                try:
                    self._wake_read.recv(4096)
                except BlockingIOError:
                    pass
                continue
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            if data:
                moved += 1
                deliver(key.data, data)
            else:
                self._forget(key)
        return moved

    def _forget(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)
        os.close(key.fd)
        finish(key.data)

    def _finish(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._wake_read:
                self._forget(key)
        self._show_merged(float("inf"))
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def deliver(sinks: Sinks, data: bytes) -> None:
    """Give bytes to all sinks of a stream: files and plain consoles at once, prefixed or filtered ones line by line."""
    if sinks.file_fd >= 0:
        _note(sinks, _write(sinks.file_fd, data))
    if sinks.console_fd >= 0 and not sinks.prefix and sinks.merger is None:
        _show(sinks.terminal, sinks.console_fd, data)
    *lines, rest = (sinks.partial + data).split(b"\n")
    if len(rest) > _CHUNK:  # a line without end: do not let it grow for ever
        lines, rest = [*lines, rest], b""
    sinks.partial = rest
    for line in lines:
        _deliver_line(sinks, line)


def finish(sinks: Sinks) -> None:
    """End a stream: pass on a last line that has no newline, and close the file."""
    if sinks.partial:
        line, sinks.partial = sinks.partial, b""
        _deliver_line(sinks, line)
    if sinks.file_fd >= 0:
        os.close(sinks.file_fd)
        sinks.file_fd = -1


def _deliver_line(sinks: Sinks, line: bytes) -> None:
    # A progress bar rewrites its line with carriage returns; only its last state is worth keeping.
    sinks.tail.append(line.rstrip(b"\r").rpartition(b"\r")[2][-_TAIL_BYTES:])
    if sinks.console_fd >= 0 and sinks.merger is not None:
        sinks.merger.add(sinks.rank, sinks.console_fd, line, time.monotonic())
    elif sinks.console_fd >= 0 and sinks.prefix:
        _show(sinks.terminal, sinks.console_fd, sinks.prefix + line + b"\n")
    if sinks.filters and any(text in line for text in sinks.filters):
        try:
            with open(sinks.filtered_path, "ab", buffering=0) as file:
                _note(sinks, _write(file.fileno(), sinks.prefix + line + b"\n"))
        except OSError as error:
            _note(sinks, error)


def _note(sinks: Sinks, problem: OSError | None) -> None:
    """Say once that a log file takes nothing more, and once that it does again."""
    if problem is not None:
        if not sinks.num_lost:
            log.error("output of a worker cannot be written to its log file: %s; the worker goes on", problem)
        sinks.num_lost += 1
    elif sinks.num_lost:
        log.warning("a worker's log file can be written again; it lacks %d pieces", sinks.num_lost)
        sinks.num_lost = 0


def _show(terminal: Terminal | None, fd: int, data: bytes) -> None:
    """Write to the console, above its live line if there is one."""
    if terminal is None:
        _write(fd, data)
    else:
        terminal.write(fd, data)


def _write(fd: int, data: bytes) -> OSError | None:
    """Write all of it; what the console or the disk says when it cannot."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # a console in non-blocking mode: wait until it takes more
            _wait_writable(fd)
        except OSError as error:
            return error
    return None


def _wait_writable(fd: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        selector.select(1.0)


def tail_of_file(path: str, lines: int) -> tuple[str, ...]:
    """Return the last lines of a log file; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])


def tail_of_sinks(sinks: Sinks, lines: int) -> tuple[str, ...]:
    """Return the last complete lines that went through the pump, and an unfinished one."""
    found = [*sinks.tail, *([sinks.partial] if sinks.partial else [])]
    return tuple(line.decode(errors="replace") for line in found[-lines:])
