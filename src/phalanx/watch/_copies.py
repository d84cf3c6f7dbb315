"""Keeps who mirrors whom in a sharded job, from what each worker says it holds. Pure.

A worker tells when a round has formed and when cells have moved. What those tell that are no longer members is left
out: what they held is gone, or is held by others too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.events._event_types import CellsHeld


class CopyTable:
    """Takes the events in order.

    >>> table = CopyTable()
    >>> for me, other in (("a", "b"), ("b", "a")):
    ...     table.take(CellsHeld(worker=me, step=3, cells=4, owned=2, unprotected=0, mirrors=(other,), copies=2))
    >>> table.to_record(["a", "b"])["mirrors"]
    {'a': ['b'], 'b': ['a']}
    >>> CopyTable().to_record(["a"]) is None
    True
    """

    def __init__(self) -> None:
        self._told: dict[str, CellsHeld] = {}

    def take(self, event: CellsHeld) -> None:
        """Note what a worker holds."""
        self._told[event.worker] = event

    def to_record(self, members: Sequence[str]) -> dict[str, Any] | None:
        """Return what the members hold; None for a job whose workers all hold everything."""
        if not self._told:
            return None
        held = {worker: self._told[worker] for worker in members if worker in self._told}
        return {
            "copies": max((one.copies or 0 for one in held.values()), default=0),
            "mirrors": {worker: list(one.mirrors) for worker, one in held.items()},
            "cells": {worker: [one.cells, one.owned, one.unprotected] for worker, one in held.items()},
            "bytes": {worker: one.bytes for worker, one in held.items()},
            "unprotected_bytes": sum(one.unprotected_bytes or 0 for one in held.values()),
            "step": max((one.step for one in held.values()), default=None),
        }
