"""Writes saves in a thread of its own, so that a step never waits for the disk.

The caller hands over a snapshot (tensors already copied). One save is written at a time; a newer snapshot replaces
one that has not been started. An error of the disk is kept and raised at the next ``submit`` or ``wait_idle``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from phalanx.comm._background import Background
from phalanx.elastic._codec import Json
from phalanx.elastic._saves import write_save

Snapshot = tuple[int, Json, list[Tensor]]
"""Step, JSON tree, tensors that nobody else touches."""


class SaveWriter:
    def __init__(self, directory: Path, *, keep: int, on_saved: Callable[[int, Path], None]) -> None:
        self.directory = directory
        self.keep = keep
        self.on_saved = on_saved
        self._next: Snapshot | None = None
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: Background | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Have it written soon; replaces a snapshot that still waits."""
        with self._changed:
            self._raise_error()
            self._next = snapshot
            if self._thread is None:
                self._thread = Background(self._run, "phalanx-saves", on_failure=self._fail)
                self._thread.start()
            self._changed.notify_all()

    def wait_idle(self) -> None:
        """Block until everything submitted is on the disk."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and not self._busy)
            self._raise_error()

    def close(self) -> None:
        """Write what was submitted, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _fail(self, error: BaseException) -> None:
        """The thread is over: the next ``submit`` says why and starts another."""
        with self._changed:
            self._error, self._next, self._busy, self._thread = error, None, False, None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                if self._next is None:
                    return
                (step, tree, tensors), self._next = self._next, None
                self._busy = True
            try:
                path = write_save(self.directory, step, tree, tensors, keep=self.keep)
                self.on_saved(step, path)
            except Exception as error:
                self._error = error
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
