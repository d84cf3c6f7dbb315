"""Remembers how far the job is known to be where it outlives all workers: in the job's store, which agents keep.

Workers that are all new find out by it that the job had been further than they can begin: it *goes back*. That is said
in one line and counted, and without saves it is an error, since all work so far would be repeated without a word.
"""

from __future__ import annotations

import sys
import time

from phalanx import protocol
from phalanx.comm.stores import Store
from phalanx.errors import JobStopped, StoreError
from phalanx.protocol import JobKeys, dump_count, timeouts

SHARE = 0.02
"""At most this share of the time goes into writing."""


class StepsLost(JobStopped):
    """All workers were lost, and there is no save to go on from."""


class CommittedSteps:
    """The record of one job; without a store it forgets everything."""

    def __init__(self, store: Store | None, keys: JobKeys) -> None:
        self._store = store
        self._keys = keys
        self._next_at = 0.0

    def note(self, step: int) -> bool:
        """So many steps are committed. The first time it is written at once, later now and then; whether it was."""
        now = time.monotonic()
        if self._store is None or now < self._next_at:
            return False
        try:
            self._store.set(self._keys.committed, dump_count(step))
        except StoreError:
            return False  # who watches the store says so; a step must not fail for it
        took = time.monotonic() - now
        self._next_at = now + max(timeouts.COMMITTED_INTERVAL, took / SHARE)
        return True

    def num_committed(self) -> int:
        """Return how many steps were committed by workers of this job, as far as is known."""
        data = None if self._store is None else self._store.get(self._keys.committed)
        return int(data) if data is not None and data.isdigit() else 0

    def go_back(self, before: int, after: int, cause: str = "all workers were lost") -> None:
        """Count that the job goes back, and say so."""
        print(f"phalanx: {describe(before, after, cause)}", file=sys.stderr, flush=True)
        if self._store is None:
            return
        data = self._store.get(protocol.SETBACKS)
        known = protocol.Setbacks() if data is None else protocol.Setbacks.from_json(data)
        self._store.set(protocol.SETBACKS, known.plus(before, after).to_json())
        self._store.set(self._keys.committed, dump_count(after))
        self._next_at = 0.0


def describe(before: int, after: int, cause: str = "all workers were lost") -> str:
    """
    >>> describe(57, 50)
    'all workers were lost: the job goes back from step 57 to step 50, its newest save; 7 steps are computed again'
    """
    where = f"step {after}, its newest save" if after else "step 0, its beginning"
    return f"{cause}: the job goes back from step {before} to {where}; {before - after} steps are computed again"


def check_setback(before: int, after: int, *, has_saves: bool, may_begin_again: bool) -> bool:
    """Return whether beginning with step ``after`` goes back; ``StepsLost`` when that is not allowed.

    >>> check_setback(5, 5, has_saves=False, may_begin_again=False)
    False
    """
    if before <= after:
        return False
    if not has_saves and not may_begin_again:
        raise StepsLost(
            f"all workers were lost after {before} committed steps, and the job has no saves: it would begin "
            "again at step 0. Give it saves, Job(saves=Saves(directory=..., every=...)), or allow it to begin again: "
            "RunOptions(begin_again=True)"
        )
    return True
