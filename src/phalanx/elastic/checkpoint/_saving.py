"""Decides when and what the job saves: the policy between ``Job`` and the files of ``_save_folder``.

A disk that does not take a save is told (event, stderr, status line) and tried again; see ``_save_writer``. Its errors
are raised by ``wait_idle`` only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx._signature import resolve_secret
from phalanx.elastic._options import Saves
from phalanx.elastic.checkpoint._bucket_saves import BucketSaves
from phalanx.elastic.checkpoint._cell_saves import CellSnapshot, Exchange, agree_on_save
from phalanx.elastic.checkpoint._owner import DirectoryOwner
from phalanx.elastic.checkpoint._save_folder import find_save, good_save, is_readable, save_names
from phalanx.elastic.checkpoint._save_memory import Staging
from phalanx.elastic.checkpoint._save_writer import SaveWriter
from phalanx.elastic.checkpoint._saves import Manifest, NoReadableSave, check_save, name_of, step_of
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._state_codec import copy_encoded
from phalanx.elastic.checkpoint._tensor_files import TensorRange
from phalanx.events._event_types import Saved, SaveFailed, SaveUnreadable
from phalanx.events._troubles import Troubles
from phalanx.events._writer import EventLog
from phalanx.storage import Place, RemotePath, StorageError, as_place


class Saving:
    def __init__(
        self, options: Saves | None, events: EventLog, troubles: Troubles | None = None, *, identity: str = ""
    ) -> None:
        """``identity``: see ``identity_of_job``."""
        self.options = options
        self._place = None if options is None else as_place(options.directory)
        self._owner = DirectoryOwner(self._place, identity) if isinstance(self._place, Path) else None
        self._bucket: BucketSaves | None = None
        if options is not None and isinstance(self._place, RemotePath):
            self._bucket = BucketSaves(self._place, None if options.local is None else Path(options.local))
        self._events = events
        self._troubles = troubles or Troubles()
        self._writer: SaveWriter | None = None
        self._found: Manifest | None = None
        self._problems: list[str] = []
        self._searched = False
        self._last_saved: int | None = None
        self._staging = Staging()

    def is_due(self, step: int) -> bool:
        return self.options is not None and self.options.every is not None and step % self.options.every == 0

    def submit(self, step: int, state: State, clean_since: int | None = None) -> None:
        """Copy the state now, write it in the background. ``clean_since``: see ``write_save``."""
        self._live_writer().submit((step, *copy_encoded(state, self._staging)), clean_since)

    def submit_cells(
        self,
        step: int,
        state: State,
        ranges: Iterable[TensorRange],
        *,
        number: int,
        count: int,
        key: str,
        clean_since: int | None = None,
    ) -> None:
        """Copy this worker's ranges now, write them in the background; all ``count`` workers do.

        ``state`` is all of the job's (as ``Job.state_dict`` has it), with tensors on the meta device for those whose
        values are in ranges; worker 0's counts. See ``CellSnapshot`` for ``key``.
        """
        snapshot = CellSnapshot.take(step, state, ranges, number=number, count=count, key=key, staging=self._staging)
        self._live_writer().submit(snapshot, clean_since)

    def _claim(self) -> None:
        """Say so if another job has these saves."""
        if self._owner is not None:
            self._owner.tell("saves", "two jobs resume from each other's saves, and remove them", self._events)

    def release(self) -> None:
        """Let another job have the directory."""
        if self._owner is not None:
            self._owner.release()

    def give_up(self) -> None:
        """A worker is lost: no longer wait for its share of a save."""
        if self._writer is not None:
            self._writer.give_up()

    def agree(self, rank: int, size: int, exchange: Exchange) -> Manifest | None:
        """Return the newest save that is readable to all workers together; ``NoReadableSave`` if none of some is."""
        if self.options is None or self._place is None:
            return None
        self._claim()
        secret = resolve_secret(self.options.secret)
        found, problems = agree_on_save(self._place, secret, rank, size, exchange)
        self._tell_problems(problems, is_found=found is not None)
        if found is None and problems:
            raise no_readable_save(self.options, {f"rank {rank}": problems})
        return found

    def _live_writer(self) -> SaveWriter:
        if self.options is None or self._place is None:
            raise RuntimeError("this job has nowhere to save to; construct it with saves=Saves(directory=...)")
        if self._writer is None:
            self._writer = SaveWriter(
                self._bucket or self._folder,
                keep=self.options.keep,
                secret=resolve_secret(self.options.secret),
                verify=self.options.verify,
                on_saved=self._on_saved,
                on_failed=self._on_failed,
            )
            if isinstance(self._place, Path):
                with suppress(OSError):  # the writer finds out too, and tells
                    self._place.mkdir(parents=True, exist_ok=True)
        self._claim()
        return self._writer

    def wait_idle(self) -> None:
        """Block until everything submitted is on the disk; ``OSError`` when the disk does not take it now."""
        if self._writer is not None:
            self._writer.wait_idle()

    def settle(self) -> None:
        """Before the end: write what is submitted if the disk takes it now. What it does not take was told."""
        try:
            self.wait_idle()
        except OSError:
            pass

    def newest_step(self) -> int | None:
        """Return the step of the newest readable save. Looks at the disk once."""
        if self.options is not None and not self._searched:
            self._searched = True
            self._claim()
            secret = resolve_secret(self.options.secret)
            if self._bucket is not None:
                self._found, self._problems = self._bucket.find(secret)
            else:
                self._found, self._problems = find_save(self._folder, secret)
            self._tell_problems(self._problems, is_found=self._found is not None)
        return self._found.step if self._found is not None else None

    def _tell_problems(self, problems: Sequence[str], *, is_found: bool) -> None:
        for problem in problems:
            self._events.write(SaveUnreadable(problem=problem))
            if is_found:
                warnings.warn(f"{problem}; the save before it is used", RuntimeWarning, stacklevel=3)

    def problems(self) -> list[str]:
        """Return what is wrong with the saves here, if there are some and none is readable."""
        return [] if self.newest_step() is not None else list(self._problems)

    def load(self) -> State | None:
        """Return the state of the newest readable save; its tensors belong to the caller."""
        self.newest_step()
        found, self._found, self._searched = self._found, None, False
        if found is None:
            return None
        state: State = found.state()
        return state

    def good_step(self, before: int) -> int:
        """Return the step of the last good save here, else that of the newest readable one; -1 if there is none."""
        assert self.options is not None, "a job that goes back has saves"
        secret = resolve_secret(self.options.secret)
        if self._bucket is not None:
            good, names = self._bucket.good_save(), self._bucket.names()
        else:
            good, names = good_save(self._folder), save_names(self._folder)
        steps = {name: step_of(name) for name in ([good] if good else []) + names}
        return next((step for name, step in steps.items() if step is not None and step <= before
                     and is_readable(self._path_of(name), secret, {})), -1)  # fmt: skip

    def open_good(self, step: int) -> Manifest:
        """Return a save whose files are as they were written."""
        assert self.options is not None, "as above"
        return check_save(self._path_of(name_of(step)), resolve_secret(self.options.secret))

    def load_good(self, step: int) -> State:
        """Return the state of a save; its tensors belong to the caller."""
        state: State = self.open_good(step).state()
        return state

    @property
    def _folder(self) -> Path:
        assert isinstance(self._place, Path), "as above, and none in a bucket"
        return self._place

    def _path_of(self, name: str) -> Path:
        """Return a save as a folder of this machine."""
        return self._folder / name if self._bucket is None else self._bucket.bring(name)

    def _on_saved(self, step: int, path: Place) -> None:
        assert self.options is not None, "only what has a directory is written"
        self._last_saved = step
        is_verified = self.options.verify and isinstance(path, Path)  # of a bucket nothing is read back
        self._events.write(Saved(step=step, path=str(path), verified=is_verified or None))
        self._troubles.worked("saves")

    def _on_failed(self, step: int, error: OSError, delay: float) -> None:
        assert self.options is not None, "only what has a directory is written"
        reason = error.strerror or str(error)
        if self._bucket is not None and not isinstance(error, (StorageError, TimeoutError)):
            reason += f" in {self._bucket.root}, where it is made first (Saves(local=...) names another folder)"
        self._events.write(SaveFailed(step=step, error=reason, next_attempt_in=delay))
        last = "none was written in this run" if self._last_saved is None else f"the last is of step {self._last_saved}"
        self._troubles.failed(
            "saves",
            f"the save of step {step} cannot be written to {self.options.directory}: {reason}; {last}, "
            f"next attempt in {delay:g} s",
        )


def no_readable_save(options: Saves | None, told: dict[str, list[str]]) -> NoReadableSave:
    """Return the error for saves of which none is readable; ``told`` is what each worker found."""
    directory = "" if options is None else options.directory
    found = [f"  {worker}: {problem}" for worker, problems in told.items() for problem in problems]
    more = [f"  ... and {len(found) - 8} more"] if len(found) > 8 else []
    return NoReadableSave(
        "\n".join(
            [
                f"there are saves in {directory}, but none of them can be read, and beginning again at step 0 would "
                "throw away what they hold:",
                *found[:8],
                *more,
                "Restore one of them from a copy, or, to begin anew, move them away or name another directory.",
            ]
        )
    )
