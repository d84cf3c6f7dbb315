"""Writes saves in threads of its own, so that a step never waits for the disk or the network.

The caller hands over a snapshot (tensors already copied). What ``LatestOnly`` says holds: one save at a time, the
newest first, tried again when the disk does not take it, or gives other bytes back (``verify``); a disk's fault does
not end training. With saves in a bucket there are two tiers: a save is made in a folder of this machine, and a second
thread uploads the newest one there, so that a slow network makes uploads rarer and saves on the disk no later. Workers
that save together upload their files themselves: no one of them has all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from phalanx.elastic.checkpoint._bucket_saves import BucketSaves
from phalanx.elastic.checkpoint._cell_saves import CellSnapshot, write_cells
from phalanx.elastic.checkpoint._latest_only import LatestOnly
from phalanx.elastic.checkpoint._save_folder import Known, write_save
from phalanx.elastic.checkpoint._state_codec import Json
from phalanx.storage import Place

Snapshot = tuple[int, Json, list[Tensor]] | CellSnapshot
"""Step, JSON tree, tensors that nobody else touches; or one worker's share of such."""

OnFailed = Callable[[int, OSError, float], None]
"""Called with the step, the error, and the seconds until the next attempt."""


@dataclass(frozen=True)
class _Waiting:
    """A snapshot to be written, or (with its folder) a save to be uploaded."""

    step: int
    snapshot: Snapshot | Path
    clean_since: int | None


class SaveWriter:
    def __init__(
        self,
        directory: Path | BucketSaves,
        *,
        keep: int,
        secret: bytes = b"",
        verify: bool = False,
        on_saved: Callable[[int, Place], None],
        on_failed: OnFailed = lambda step, error, delay: None,
    ) -> None:
        self.directory = directory
        self.keep = keep
        self.secret = secret
        self.verify = verify
        self.on_saved = on_saved
        self._known: Known = {}

        def failed(item: _Waiting, error: OSError, delay: float) -> None:
            on_failed(item.step, error, delay)

        self._saves: LatestOnly[_Waiting] = LatestOnly(self._write, "phalanx-saves", on_failed=failed)
        self._uploads: LatestOnly[_Waiting] = LatestOnly(self._upload, "phalanx-uploads", on_failed=failed)

    def submit(self, snapshot: Snapshot, clean_since: int | None = None) -> None:
        """Have it written soon; replaces a snapshot that still waits. ``clean_since``: see ``write_save``."""
        step = snapshot.step if isinstance(snapshot, CellSnapshot) else snapshot[0]
        self._saves.submit(_Waiting(step, snapshot, clean_since))

    def wait_idle(self) -> None:
        """Block until everything submitted is where it should be. ``OSError`` when an attempt made now fails."""
        self._saves.wait_idle()
        self._uploads.wait_idle()

    def give_up(self) -> None:
        """Forget saves that several workers write together: one of them is lost. One's own are written."""
        self._saves.give_up(lambda item: isinstance(item.snapshot, CellSnapshot))

    def close(self) -> None:
        """Write what was submitted, if that is possible now, then end the threads."""
        self._saves.close()
        self._uploads.close()

    def _write(self, item: _Waiting) -> None:
        """Write a save; there is none if this worker only wrote its share of one, or nobody wants it now."""
        assert not isinstance(item.snapshot, Path), "folders are uploaded"
        if isinstance(item.snapshot, CellSnapshot):
            path = self._write_share(item.snapshot, item.clean_since)
            if path is not None:
                self.on_saved(item.step, path)
            return
        is_remote = isinstance(self.directory, BucketSaves)
        step, tree, tensors = item.snapshot
        path = write_save(
            self.directory.folder if isinstance(self.directory, BucketSaves) else self.directory,
            step,
            tree,
            tensors,
            keep=self.keep,
            secret=self.secret,
            known=self._known,
            clean_since=item.clean_since,
            verify=self.verify,
        )
        if is_remote:
            self._uploads.submit(_Waiting(step, path, item.clean_since))
        else:
            self.on_saved(step, path)

    def _write_share(self, snapshot: CellSnapshot, clean_since: int | None) -> Place | None:
        if isinstance(self.directory, BucketSaves):
            return self.directory.write_share(
                snapshot,
                keep=self.keep,
                secret=self.secret,
                clean_since=clean_since,
                is_unwanted=self._saves.is_unwanted,
            )
        return write_cells(
            self.directory,
            snapshot,
            keep=self.keep,
            secret=self.secret,
            known=self._known,
            clean_since=clean_since,
            is_unwanted=self._saves.is_unwanted,
            verify=self.verify,
        )

    def _upload(self, item: _Waiting) -> None:
        assert isinstance(item.snapshot, Path), "snapshots are written to the disk first"
        assert isinstance(self.directory, BucketSaves), "only these are uploaded"
        path = self.directory.upload(item.snapshot, keep=self.keep, clean_since=item.clean_since)
        if path is not None:
            self.on_saved(item.step, path)
