"""The events of other agents: one that cannot be read is left out, and what comes after it is not."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest
from watching import told

from phalanx.events import _event_types as types
from phalanx.events._lines import to_json
from phalanx.watch import _peer_agents
from phalanx.watch._http import HttpRequest, HttpResponse, HttpServer
from phalanx.watch._peer_agents import PeerAgents

pytestmark = pytest.mark.fast


def saved(step: int) -> str:
    return to_json(types.Saved(worker="n.a", time=100.0 + step, step=step, path=f"/saves/{step}"))


@pytest.mark.parametrize("bad", ["{no JSON", "[" * 5000, json.dumps({"long": "x" * 9000}), "7"])
def test_what_comes_after_an_event_that_cannot_be_read_is_known(
    bad: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(_peer_agents, "MAX_LINE", 4096)
    monkeypatch.setattr(_peer_agents, "PAUSE", 0.01)
    asked: list[str | None] = []
    again = threading.Event()

    def answer(request: HttpRequest) -> HttpResponse:
        """The first time all events, later those after the last that was heard: none."""
        asked.append(request.headers.get("last-event-id"))
        lines = [saved(1), bad, saved(2)] if len(asked) == 1 else []
        if len(asked) > 1:
            again.set()
        pieces = [f"id: a-{number}\nevent: x\ndata: {line}\n\n".encode() for number, line in enumerate(lines, 1)]
        return HttpResponse(stream=iter(pieces), kind="text/event-stream")

    hub = told([])
    server = HttpServer(answer)
    server.start()
    peers = PeerAgents(hub, None)
    with caplog.at_level(logging.WARNING):
        peers.follow({f"http://127.0.0.1:{server.port}"})
        assert again.wait(60), "it comes back"
        peers.stop()
    server.stop()
    assert asked[:2] == [None, "a-3"], "it goes on after the last, and asks for none again"
    assert [json.loads(event.line)["step"] for event in hub.after(0)] == [1, 2]
    assert hub.view.num_bad == 1
    said = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert len(said) == (0 if bad == "7" else 1), "what is JSON, but no event, is only counted"
