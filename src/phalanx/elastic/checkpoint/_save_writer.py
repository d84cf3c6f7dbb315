"""Writes saves in a thread of its own, so that a step never waits for the disk.

The caller hands over a snapshot (tensors already copied). One save is written at a time; a newer snapshot replaces
one that has not been written. When the disk does not take it (``OSError``: full, read-only, out of reach) the snapshot
stays and is tried again with growing pauses; ``on_failed`` hears of each attempt, and nobody else: a disk's fault does
not end training. ``wait_idle`` is for a caller that must know: it tries at once and raises. Any other error is a fault
of ours and is raised at the next ``submit`` or ``wait_idle``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from phalanx.comm._background import Background
from phalanx.elastic.checkpoint._save_folder import Known, write_save
from phalanx.elastic.checkpoint._state_codec import Json
from phalanx.events._troubles import Backoff

Snapshot = tuple[int, Json, list[Tensor]]
"""Step, JSON tree, tensors that nobody else touches."""

OnFailed = Callable[[int, OSError, float], None]
"""Called with the step, the error, and the seconds until the next attempt."""


class SaveWriter:
    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        secret: bytes = b"",
        on_saved: Callable[[int, Path], None],
        on_failed: OnFailed = lambda step, error, delay: None,
    ) -> None:
        self.directory = directory
        self.keep = keep
        self.secret = secret
        self.on_saved = on_saved
        self.on_failed = on_failed
        self._known: Known = {}
        self._next: Snapshot | None = None
        self._backoff = Backoff()
        self._is_hurried = False
        """Whether someone waits: the next attempt is made at once."""
        self._num_begun = 0
        self._failed = (0, OSError())
        """The number of the last attempt that the disk did not take, and its error."""
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
        """Block until everything submitted is on the disk. ``OSError`` when an attempt made now fails."""
        with self._changed:
            before = self._num_begun
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle or self._failed[0] > before)
            self._is_hurried = False
            self._raise_error()
            if not self._is_idle:
                raise self._failed[1]

    def close(self) -> None:
        """Write what was submitted, if the disk takes it now, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    @property
    def _is_idle(self) -> bool:
        return self._next is None and not self._busy

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
        while (snapshot := self._wait_next()) is not None:
            step, tree, tensors = snapshot
            failed: OSError | None = None
            try:
                path = write_save(
                    self.directory, step, tree, tensors, keep=self.keep, secret=self.secret, known=self._known
                )
                self.on_saved(step, path)
            except OSError as error:
                failed = error
            except Exception as error:
                self._error = error
            self._end_attempt(snapshot, failed)

    def _wait_next(self) -> Snapshot | None:
        """Return the snapshot to write now; None when it is time to end."""
        with self._changed:
            while self._next is None or not self._is_due():
                if self._next is None and self._closed:
                    return None
                self._changed.wait(None if self._next is None else self._backoff.pause)
            snapshot, self._next = self._next, None
            self._busy, self._is_hurried = True, False
            self._num_begun += 1
            return snapshot

    def _is_due(self) -> bool:
        return self._is_hurried or self._closed or not self._backoff.pause

    def _end_attempt(self, snapshot: Snapshot, failed: OSError | None) -> None:
        if failed is not None:  # told before anybody who waits goes on
            self.on_failed(snapshot[0], failed, self._backoff.fail())
        else:
            self._backoff.reset()
        with self._changed:
            if failed is not None:
                self._failed = (self._num_begun, failed)
                if self._next is None and not self._closed:
                    self._next = snapshot
            self._busy = False
            self._changed.notify_all()
