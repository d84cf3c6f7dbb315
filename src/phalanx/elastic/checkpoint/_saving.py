"""Decides when and what the job saves: the policy between ``Job`` and the files of ``_save_folder``.

A disk that does not take a save is told (event, stderr, status line) and tried again; see ``_save_writer``. Its errors
are raised by ``wait_idle`` only.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from phalanx._signature import resolve_secret
from phalanx.elastic._options import Saves
from phalanx.elastic.checkpoint._save_folder import find_save
from phalanx.elastic.checkpoint._save_writer import SaveWriter
from phalanx.elastic.checkpoint._saves import NoReadableSave, Save
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._state_codec import copy_encoded, decode
from phalanx.events._event_types import Saved, SaveFailed, SaveUnreadable
from phalanx.events._troubles import Troubles
from phalanx.events._writer import EventLog


class Saving:
    def __init__(self, options: Saves | None, events: EventLog, troubles: Troubles | None = None) -> None:
        self.options = options
        self._events = events
        self._troubles = troubles or Troubles()
        self._writer: SaveWriter | None = None
        self._found: Save | None = None
        self._problems: list[str] = []
        self._searched = False
        self._last_saved: int | None = None

    def is_due(self, step: int) -> bool:
        return self.options is not None and self.options.every is not None and step % self.options.every == 0

    def submit(self, step: int, state: State) -> None:
        """Copy the state now, write it in the background."""
        if self.options is None:
            raise RuntimeError("this job has nowhere to save to; construct it with saves=Saves(directory=...)")
        if self._writer is None:
            self._writer = SaveWriter(
                Path(self.options.directory),
                keep=self.options.keep,
                secret=resolve_secret(self.options.secret),
                on_saved=self._on_saved,
                on_failed=self._on_failed,
            )
        self._writer.submit((step, *copy_encoded(state)))

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
            secret = resolve_secret(self.options.secret)
            self._found, self._problems = find_save(Path(self.options.directory), secret)
            for problem in self._problems:
                self._events.write(SaveUnreadable(problem=problem))
                if self._found is not None:
                    warnings.warn(f"{problem}; the save before it is used", RuntimeWarning, stacklevel=2)
        return self._found.step if self._found is not None else None

    def problems(self) -> list[str]:
        """Return what is wrong with the saves here, if there are some and none is readable."""
        return [] if self.newest_step() is not None else list(self._problems)

    def load(self) -> State | None:
        """Return the state of the newest readable save; its tensors belong to the caller."""
        self.newest_step()
        found, self._found, self._searched = self._found, None, False
        if found is None:
            return None
        state: State = decode(found.tree, found.tensors)
        return state

    def _on_saved(self, step: int, path: Path) -> None:
        self._last_saved = step
        self._events.write(Saved(step=step, path=str(path)))
        self._troubles.worked("saves")

    def _on_failed(self, step: int, error: OSError, delay: float) -> None:
        assert self.options is not None, "only what has a directory is written"
        reason = error.strerror or str(error)
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
