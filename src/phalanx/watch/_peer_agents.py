"""Follows the events of other agents, so that the page of one shows the whole job.

One thread for each agent that is followed, which comes back after it was cut off and goes on where it was. An agent
that cannot be reached is said once; its workers are then known only from what others say of them. An event that cannot
be read is said and left out.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from urllib.parse import urlsplit

from phalanx.comm import _background as background
from phalanx.watch._hub import Hub

log = logging.getLogger(__name__)

PATIENCE = 30.0
PAUSE = 1.0
MAX_LINE = 1 << 22


class PeerAgents:
    """The agents that one follows; ``token`` is the job's."""

    def __init__(self, hub: Hub, token: str | None) -> None:
        self._hub = hub
        self._token = token
        self._followed: dict[str, threading.Event] = {}
        self._positions: dict[str, str] = {}
        """By address: the last event of it."""
        self._lock = threading.Lock()

    def follow(self, urls: set[str]) -> None:
        """Follow these agents, and no others any more."""
        with self._lock:
            for url in set(self._followed) - urls:
                self._followed.pop(url).set()
            for url in urls - set(self._followed):
                stopped = self._followed[url] = threading.Event()
                background.start(
                    lambda url=url, stopped=stopped: self._run(url, stopped),  # type: ignore[misc]  # bound now
                    "phalanx-peer",
                    on_failure=lambda error: log.warning("an agent is not followed any more: %r", error),
                )

    def stop(self) -> None:
        self.follow(set())

    def _run(self, url: str, stopped: threading.Event) -> None:
        has_said = False
        while not stopped.is_set():
            try:
                self._read(url, stopped)
                has_said = False
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not has_said:
                    log.warning("the events of the agent at %s cannot be followed: %s", url, error)
                has_said = True
            stopped.wait(PAUSE)

    def _read(self, url: str, stopped: threading.Event) -> None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if position := self._positions.get(url):
            headers["Last-Event-ID"] = position
        try:
            connection.request("GET", "/events?bulk=1&local=1", headers=headers)
            answer = connection.getresponse()
            number = ""
            if answer.status != 200:
                raise ValueError(f"it answers {answer.status}")
            while not stopped.is_set():
                line = answer.readline(MAX_LINE)
                if not line:
                    return
                rest = line
                while rest and not rest.endswith(b"\n"):  # too long: read to its end, and then no JSON
                    rest = answer.readline(MAX_LINE)
                if not rest:
                    return
                if line.startswith(b"id: "):
                    number = line[4:].strip().decode(errors="replace")
                elif line.startswith(b"data: "):
                    self._take(url, line[6:])
                    self._positions[url] = number
        finally:
            connection.close()

    def _take(self, url: str, data: bytes) -> None:
        """Add an event. One that cannot be read is left out and counted: it would be the same the next time."""
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            log.warning("an event of the agent at %s cannot be read, and is left out: %r", url, data[:100])
            record = None
        self._hub.add_record(record, is_local=False)
