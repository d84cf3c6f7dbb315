"""Asks a running job for something, through its store: more workers, fewer nodes, a save, its end.

The commands and the page do it alike. Whoever can write signed records can ask; the agents and workers do the rest.
"""

from __future__ import annotations

from phalanx.comm.stores._interface import Store
from phalanx.protocol import (
    NODES,
    SAVE_ASKED,
    STOP_ASKED,
    NodeRecord,
    RecordError,
    StopRequest,
    dump_count,
    parse_count,
    wish_key,
)


class Asking:
    """``store`` is the job's, signed where the job has a secret."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def nodes(self) -> list[NodeRecord]:
        """Return the live nodes, in the order in which they came."""
        found = []
        for data in self._store.items(NODES).values():  # verified: a wrong secret finds nobody
            try:
                found.append(NodeRecord.from_json(data))
            except RecordError:
                continue
        return sorted(found, key=lambda node: node.ticket)

    def scale(self, size: int, node: str = "") -> list[str]:
        """Ask nodes for so many workers each; the ids of those that were asked."""
        if size < 1:
            raise ValueError(f"{size} workers for each node; expected at least 1 (phalanx stop ends a job)")
        asked = sorted(one.id for one in self.nodes() if one.id.startswith(node))  # an id starts with its host
        if not asked:
            raise ValueError(f"no node of the job matches {node!r}" if node else "the job has no node")
        for node_id in asked:
            self._store.set(wish_key(node_id), dump_count(size))
        return asked

    def drain(self, node: str) -> str:
        """Ask the workers of one node to leave; its id."""
        live = self.nodes()
        found = [one.id for one in live if node and one.id.startswith(node)]
        names = ", ".join(one.id for one in live)
        if len(found) != 1:
            what = "no node" if not found else f"{len(found)} nodes"
            raise ValueError(f"{what} of the job matches {node!r}; expected the beginning of one of {names}")
        if len(live) == 1:
            raise ValueError(f"node {found[0]} is the only one; phalanx stop ends the job")
        self._store.set(wish_key(found[0]), dump_count(0))
        return found[0]

    def save(self) -> int:
        """Ask for a save after the next step; which request it is."""
        while True:
            before = self._store.get(SAVE_ASKED)
            try:
                number = 0 if before is None else parse_count(before, "the number of saves")
            except RecordError:
                number = 0
            if self._store.compare_and_set(SAVE_ASKED, before, dump_count(number + 1)):
                return number + 1

    def stop(self, reason: str) -> None:
        """Ask all agents to stop."""
        self._store.set(STOP_ASKED, StopRequest(reason=reason).to_json())
