"""Asks Azure's metadata service for scheduled events that take this machine away.

The list holds the events of all machines of a scale set: those that name this one count, by the name that the
service says it has. ``Freeze`` (a pause of seconds) is no reason to leave. Nothing is acknowledged, so that Azure waits
for as long as it had promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.preemption._metadata_request import INTERVAL, ask, parse_object, parse_time
from phalanx.preemption._notice import Notice, SourceProblem

ENDPOINT = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
FINAL = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})


@dataclass(kw_only=True)
class AzureNotices:
    """A machine that Azure will preempt (30 s ahead), delete, redeploy or reboot."""

    endpoint: str = ENDPOINT
    interval: float = INTERVAL
    name: str = "azure"
    _machine: str = field(default="", init=False, repr=False)

    def look(self, now: float) -> Notice | None:
        events = parse_object(self._ask(EVENTS), EVENTS).get("Events")
        if not isinstance(events, list):
            raise SourceProblem(f"{EVENTS} said nothing of Events; expected a list")
        for event in events:
            kind, resources = _read(event)
            if kind in FINAL and self._own_name() in resources:
                reason = f"Azure has scheduled the event {kind} for this machine"
                return Notice(source=self.name, reason=reason, at=parse_time(event.get("NotBefore")))
        return None

    def _own_name(self) -> str:
        if not self._machine:
            self._machine = self._ask(NAME)
            if not self._machine:
                raise SourceProblem(f"{NAME} said nothing; expected the name of this machine")
        return self._machine

    def _ask(self, path: str) -> str:
        return ask(f"{self.endpoint}{path}", headers={"Metadata": "true"}).expect_ok(path)


def _read(event: Any) -> tuple[str, list[Any]]:
    """Return the type of an event and the machines that it is about."""
    kind = event.get("EventType") if isinstance(event, dict) else None
    resources = event.get("Resources") if isinstance(event, dict) else None
    if not isinstance(kind, str) or not isinstance(resources, list):
        raise SourceProblem(f"{EVENTS} holds the event {str(event)[:80]}; expected EventType and Resources")
    return kind, resources
