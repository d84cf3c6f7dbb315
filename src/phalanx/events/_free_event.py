"""Defines the event of no type of its own: a name and whatever belongs to it, as torch's tools write it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import ClassVar


class EventSource(str, Enum):
    """Who saw it."""

    AGENT = "AGENT"
    WORKER = "WORKER"


EventMetadataValue = str | int | float | bool | None


@dataclass
class Event:
    """A free-form event: what is not one of the types below.

    >>> Event("saved", EventSource.WORKER, 7, {"step": 3}).serialize()
    '{"name": "saved", "source": "WORKER", "timestamp": 7, "metadata": {"step": 3}}'
    """

    name: str
    source: EventSource = EventSource.AGENT
    timestamp: float = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    kind: ClassVar[str] = "event"

    def serialize(self) -> str:
        """Return it as JSON, as torch's tools write it."""
        return json.dumps(asdict(self))

    __str__ = serialize

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Return the event of such a text; an event is returned as it is."""
        if isinstance(data, Event):
            return data
        found = json.loads(data)
        return Event(**{**found, "source": EventSource[found["source"]]})
