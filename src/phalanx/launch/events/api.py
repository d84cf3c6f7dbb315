"""Offers events of one's own under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.events import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
]
