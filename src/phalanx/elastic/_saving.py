"""When and what the job saves: the policy between ``Job`` and the files of ``_saves``."""

from __future__ import annotations

import warnings
from pathlib import Path

from phalanx.elastic._codec import copy_encoded, decode
from phalanx.elastic._options import Saves
from phalanx.elastic._records import Events
from phalanx.elastic._saves import Save, find_save
from phalanx.elastic._state import State
from phalanx.elastic._writer import SaveWriter


class Saving:
    def __init__(self, options: Saves | None, events: Events) -> None:
        self.options = options
        self._events = events
        self._writer: SaveWriter | None = None
        self._found: Save | None = None
        self._searched = False

    def is_due(self, step: int) -> bool:
        return self.options is not None and self.options.every is not None and step % self.options.every == 0

    def submit(self, step: int, state: State) -> None:
        """Copy the state now, write it in the background."""
        if self.options is None:
            raise RuntimeError(
                "this job has nowhere to save to; construct it with saves=Saves(directory=...)"
            )
        if self._writer is None:
            self._writer = SaveWriter(
                Path(self.options.directory), keep=self.options.keep, on_saved=self._on_saved
            )
        self._writer.submit((step, *copy_encoded(state)))

    def wait_idle(self) -> None:
        if self._writer is not None:
            self._writer.wait_idle()

    def newest_step(self) -> int | None:
        """The step of the newest readable save. Looks at the disk once."""
        if self.options is not None and not self._searched:
            self._searched = True
            self._found, problems = find_save(Path(self.options.directory))
            for problem in problems:
                self._events.emit("bad_save", problem=problem)
                warnings.warn(f"{problem}; the save before it is used", RuntimeWarning, stacklevel=2)
        return self._found.step if self._found is not None else None

    def load(self) -> State | None:
        """The state of the newest readable save; its tensors belong to the caller."""
        self.newest_step()
        found, self._found, self._searched = self._found, None, False
        if found is None:
            return None
        state: State = decode(found.tree, found.tensors)
        return state

    def _on_saved(self, step: int, path: Path) -> None:
        self._events.emit("saved", step=step, path=str(path))
