"""Keeps which workers a node has, in the order of their local ranks.

Owns worker ids: unique among all workers that the job ever has, kept by a worker for life. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class WorkerStatus(Protocol):
    """Says what ``WorkerIds`` wants to know about a worker that was started."""

    @property
    def is_running(self) -> bool: ...

    @property
    def wants_successor(self) -> bool: ...


class WorkerIds:
    """Holds the ids of a node's workers. The position in ``ids`` is the local rank.

    >>> worker_ids = WorkerIds("node1.a", 2)
    >>> worker_ids.ids
    ['node1.a.0', 'node1.a.1']
    """

    def __init__(self, prefix: str, size: int) -> None:
        self.ids: list[str] = []
        self._prefix = prefix
        self._count = 0
        self.grow(size)

    @property
    def size(self) -> int:
        return len(self.ids)

    def grow(self, size: int) -> None:
        """Add workers until there are ``size``."""
        while len(self.ids) < size:
            self.ids.append(self._new_id())

    def renew(self, size: int) -> None:
        """Replace all workers by ``size`` new ones."""
        self.ids = []
        self.grow(size)

    def drop(self, worker_id: str) -> None:
        """Close a worker's place; those behind it move up."""
        self.ids.remove(worker_id)

    def close_ranks(self, started: Mapping[str, WorkerStatus], *, replace: bool) -> dict[str, str | None]:
        """Keep every survivor in its place; one that failed is replaced in its place or dropped, one that is done
        or was asked to go is dropped. Returns who takes the place of each of those (None: nobody)."""
        successors: dict[str, str | None] = {}
        ids: list[str] = []
        for worker_id in self.ids:
            worker = started.get(worker_id)
            if worker is None or worker.is_running:
                ids.append(worker_id)
                continue
            successors[worker_id] = self._new_id() if replace and worker.wants_successor else None
            ids += [successor for successor in (successors[worker_id],) if successor]
        self.ids = ids
        return successors

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}.{self._count - 1}"
