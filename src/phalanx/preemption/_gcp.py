"""Asks the metadata server of Google Compute Engine whether the instance is preempted or about to be shut down.

An answer counts only with the header ``Metadata-Flavor: Google``: without it somebody else answers. Live migration is
no reason to leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.preemption._metadata_request import ask
from phalanx.preemption._notice import Notice, SourceProblem

ENDPOINT = "http://metadata.google.internal"
INSTANCE = "/computeMetadata/v1/instance"
GRACE = 30.0
"""Seconds between the notice of a preemption and the end."""


@dataclass(frozen=True, kw_only=True)
class GcpNotices:
    """A spot or preemptible instance that is being taken away (30 s ahead), or host maintenance that ends it."""

    endpoint: str = ENDPOINT
    interval: float = 1.0
    """Shorter than elsewhere: there are only 30 s."""
    name: str = "gcp"

    def look(self, now: float) -> Notice | None:
        if self._value("preempted", expected=("TRUE", "FALSE")) == "TRUE":
            return Notice(source=self.name, reason="Google Cloud preempts this instance", at=now + GRACE)
        event = self._value("maintenance-event")
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(source=self.name, reason="Google Cloud ends this instance for maintenance of its host")
        return None

    def _value(self, what: str, expected: tuple[str, ...] = ()) -> str:
        """Return a value of the instance; empty if it has none of that name."""
        path = f"{INSTANCE}/{what}"
        answer = ask(f"{self.endpoint}{path}", headers={"Metadata-Flavor": "Google"})
        if answer.headers.get("metadata-flavor") != "Google":
            raise SourceProblem(f"{self.endpoint} answered without 'Metadata-Flavor: Google': it is not Google's")
        if answer.status == 404:
            return ""
        text = answer.expect_ok(path)
        if expected and text not in expected:
            raise SourceProblem(f"{path} said {text[:80]!r}; expected one of {', '.join(expected)}")
        return text
