"""Writes the audit of a job: which worker computed which samples for which step, and which steps it committed.

A worker writes only its own file; ``phalanx.elastic.audit`` reads those of all workers together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.events._troubles import Troubles
from phalanx.events._writer import JsonLines


class Audit(JsonLines):
    """Which worker computed which samples for which step, and which steps it committed.

    ``lineage`` is (attempt, generation, round). An *attempt* is a run of the job from its beginning or from a save; its
    number grows with time. Of several commits of one step in one attempt, that of the largest lineage counts, because
    the others were lost with the workers that made them.
    """

    what = "audit"

    def __init__(self, path: str | Path | None, *, troubles: Troubles | None = None) -> None:
        super().__init__(path, troubles=troubles)
        self._computed: list[dict[str, Any]] = []
        """Slots of the current step that are not written yet."""

    def begin(self, job: dict[str, Any]) -> None:
        self.append({"kind": "job", **job})

    def attempt(self, number: int, step: int, parent: int | None) -> None:
        """An attempt begins at ``step``: with the state that attempt ``parent`` saved, or with none."""
        self.append({"kind": "attempt", "attempt": number, "step": step, "parent": parent})

    def computed(self, lineage: list[int], epoch: int, step: int, slot: int, indices: list[int]) -> None:
        """A slot is computed: written with the others of its step by ``write_computed``."""
        if self.path is None:
            return
        self._computed.append(
            {
                "kind": "slot",
                "lineage": lineage,
                "epoch": epoch,
                "step": step,
                "slot": slot,
                "indices": indices,
            }
        )

    def write_computed(self) -> None:
        """Write the slots that are computed: before others may commit what they have heard of them, or when the step is
        dropped."""
        if self._computed:
            found, self._computed = self._computed, []
            self.append(*found)

    def close(self) -> None:
        self.write_computed()
        super().close()

    def committed(self, lineage: list[int], epoch: int, step: int) -> None:
        self.append({"kind": "commit", "lineage": lineage, "epoch": epoch, "step": step})

    def skipped(self, lineage: list[int], step: int, first: int, reason: str) -> None:
        """Steps ``first`` to ``step`` count as committed, but what they computed is not, or no more, in the weights."""
        self.append({"kind": "skip", "lineage": lineage, "step": step, "first": first, "reason": reason})

    def ended(self, lineage: list[int], step: int) -> None:
        """The loop is over with ``step`` steps committed: a log that lacks its last lines can be told."""
        self.append({"kind": "end", "lineage": lineage, "step": step})
