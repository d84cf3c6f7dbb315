"""Keeps what is known of a job's machines: their load, their workers, and which are out or about to go. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from phalanx.events._agent_events import ActionAsked, LimitReached, NodeLoad, NodeNoticed, WorkerFailed, WorkerReplaced
from phalanx.events._event_types import AnyEvent
from phalanx.watch._lifelines import Lifelines

MAX_LOADS = 120
"""Of each node, the last that are kept: ten minutes."""


class NodeTable:
    """Takes the events in order."""

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()
        """By host."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """By host and cause."""
        self._loads: dict[str, deque[NodeLoad]] = {}
        self._out: dict[str, str] = {}
        """By node: why no worker is started on it any more."""
        self._going: dict[str, str] = {}
        """By node or host: why its workers leave."""

    def take(self, event: AnyEvent) -> None:
        """Note what an event says about a node."""
        if isinstance(event, NodeLoad):
            if event.node != event.host and event.node not in self._loads and event.node_rank >= 0:
                early = self._loads.pop(event.host, None)  # before the rendezvous it went by its machine's name
                self._loads[event.node] = early or deque(maxlen=MAX_LOADS)
            self._loads.setdefault(event.node, deque(maxlen=MAX_LOADS)).append(event)
        elif isinstance(event, WorkerFailed):
            self.failures[event.host, event.cause] += 1
        elif isinstance(event, WorkerReplaced):
            self.restarts[event.host] += 1
        elif isinstance(event, LimitReached):
            self._out.update(dict.fromkeys(event.nodes, event.reason))
        elif isinstance(event, NodeNoticed):
            self._going[event.host] = f"{event.source}: {event.reason}"
        elif isinstance(event, ActionAsked) and event.action == "drain":
            self._going[event.detail] = f"drain, asked by {event.by}"

    def to_records(self, lifelines: Lifelines) -> list[dict[str, Any]]:
        """Return a row for each node, those first that were told of first."""
        loaded = {name: loads[-1] for name, loads in self._loads.items()}
        told = {*loaded, *(load.host for load in loaded.values())}
        hosts = {life.host for life in lifelines.lives.values() if life.host}
        return [self._record(name, lifelines) for name in sorted({*loaded, *(hosts - told), *(set(self._out) - told)})]

    def _record(self, name: str, lifelines: Lifelines) -> dict[str, Any]:
        loads = self._loads.get(name)
        last = loads[-1] if loads else None
        host = last.host if last is not None else name
        running = [one.worker for one in lifelines.lives.values() if one.host == host and one.end == "running"]
        return {
            "node": name,
            "host": host,
            "workers": len(running),
            "restarts": self.restarts[host],
            "left_out": self._out.get(name, ""),
            "leaving": self._going.get(name) or self._going.get(host, ""),
            "cpu": None if last is None else round(last.cpu, 4),
            "memory_used": None if last is None else last.memory_used,
            "memory_total": None if last is None else last.memory_total,
            "received": None if last is None else round(last.received),
            "sent": None if last is None else round(last.sent),
            "cpu_history": [round(one.cpu, 3) for one in loads or ()],
            "seen": None if last is None else round(last.time, 3),
        }
