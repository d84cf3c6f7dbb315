"""What the tests of this folder share: a job's story as events, a server that tells it, and a plain client."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from phalanx.events import _event_types as types
from phalanx.events._event_types import AnyEvent
from phalanx.watch._access import PageAccess
from phalanx.watch._http import HttpServer
from phalanx.watch._hub import Hub
from phalanx.watch._site import NoHost, Site

SECRET = b"the secret of the job"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028"
AGENT: dict[str, Any] = {"job": "j", "local_rank": 0, "pid": 7, "host": "h", "generation": 0}


def formed(worker: str, time: float, workers: tuple[str, ...], **more: object) -> types.RoundFormed:
    values: dict[str, object] = {"generation": 0, "round": 0, "joined": (), "left": (), "step": 0, "seconds": 0.0}
    return types.RoundFormed(worker=worker, time=time, workers=workers, **(values | more))  # type: ignore[arg-type]


def story(text: str = "boom") -> list[AnyEvent]:
    """Two workers; n.b dies of ``text`` at step 3, n.c takes its place, hangs, and leaves; a save, the node's load, and
    the end."""
    both = ("n.a", "n.b")
    events: list[AnyEvent] = [types.GenerationFormed(time=99.0, job="j", generation=0, num_nodes=1, num_workers=2)]
    for rank, worker in enumerate(both):
        events += [
            types.WorkerStarted(worker_id=worker, rank=rank, time=100.0, **AGENT),
            types.TrainingStarted(worker=worker, time=101.0, pid=1, total_steps=10, num_slots=4),
            formed(worker, 102.0, both, seconds=0.5, joined=both, rank=rank, first_slot=2 * rank, num_slots=2),
        ]
    for step in range(3):
        events.append(
            types.StepCommitted(
                worker="n.a", time=103.0 + step, step=step, epoch=0, loss=3.0 - step, samples=8, generation=0, round=0
            )
        )
    for worker, compute in (("n.a", 300_000), ("n.b", 900_000)):
        events.append(
            types.WorkerStepTimes(
                worker=worker,
                time=105.0,
                step=0,
                compute=(compute,) * 3,
                wait=(1_000_000 - compute,) * 3,
                data=(0,) * 3,
                collective_bytes={"all_to_all": 100, "all_gather_into_tensor": 50},
            )
        )
    events += [
        types.Saved(worker="n.a", time=105.1, step=3, path="/saves/3", verified=True),
        types.WorkerExited(worker_id="n.b", rank=1, time=105.5, exit_code=1, **AGENT),
        types.WorkerFailed(
            worker_id="n.b", rank=1, time=105.5, exit_code=1, cause="ValueError", message=text, stderr=(text,), **AGENT
        ),
        types.WorkerReplaced(job="j", time=105.51, host="h", old_worker_id="n.b", worker_id="n.c", rank=1),
        types.GroupLost(worker="n.a", time=105.52, generation=0, step=3, reason="n.b is gone", dropped=0.3, waited=0.1),
        formed("n.a", 105.6, ("n.a",), generation=1, left=("n.b",), seconds=0.08, rank=0, first_slot=0, num_slots=4),
        types.StepCommitted(
            worker="n.a", time=106.0, step=3, epoch=0, loss=0.5, samples=8, generation=1, round=0
        ),
        formed(
            "n.a", 107.0, ("n.a", "n.c"), generation=1, round=1, joined=("n.c",), seconds=0.02, rank=0, num_slots=2,
            first_slot=0, is_verified=True,
        ),
        types.NodeLoad(job="j", node="n", host="h", time=107.0, cpu=0.5, memory_used=1 << 30, memory_total=4 << 30,
            received=1500.0, sent=2.5e6),
        types.CellsHeld(
            worker="n.a", time=107.0, step=4, cells=9, owned=5, mirrors=("n.c",), unprotected=0, copies=2, bytes=9000,
            unprotected_bytes=0,
        ),
        types.LimitReached(
            job="j", time=107.0, limit="node", reason="node m is left out: all failures were its", nodes=("m",)
        ),
        types.WorkerHung(job="j", worker_id="n.c", rank=1, seconds=5.0, stacks=f"in all_reduce: {text}", time=107.2),
        types.TrainingLeft(worker="n.c", time=107.6, step=4),
        types.TrainingFinished(worker="n.a", time=108.0, step=4),
        types.ShutDown(job="j", reason="SUCCEEDED", succeeded=True, time=108.5),
    ]  # fmt: skip
    return events


def told(events: list[AnyEvent]) -> Hub:
    hub = Hub("j", clock=lambda: 110.0)
    for event in events:
        hub.add(event)
    assert hub.view.num_bad == 0
    return hub


class Client:
    """One request after the other; what came back."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)

    def ask(
        self, path: str, *, method: str = "GET", body: bytes | None = None, timeout: float = 30.0, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=timeout)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=body, headers=named)
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def json(self, path: str, **headers: str) -> Any:
        status, _, body = self.ask(path, **headers)
        assert status == 200, body
        return json.loads(body)

    def stream(self, path: str, num: int, **headers: str) -> list[dict[str, str]]:
        """The first so many events of a stream."""
        connection = http.client.HTTPConnection(*self._address, timeout=30.0)
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        assert answer.status == 200
        found: list[dict[str, str]] = []
        now: dict[str, str] = {}
        while len(found) < num:
            line = answer.readline().decode().rstrip("\n")
            if not line and "data" in now:
                found.append(now)
                now = {}
            elif line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                now[name] = value
        connection.close()
        return found


class Doing(NoHost):
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        self.done: list[tuple[str, dict[str, Any]]] = []
        self.alive = 0.0

    def act(self, action: str, wish: dict[str, Any], by: str) -> str:
        if action not in ("scale", "drain", "save", "stop"):
            raise ValueError(f"no action {action!r}")
        self.done.append((action, wish))
        return f"{action} is done"

    def tail(self, worker: str) -> list[str]:
        return [f"last line of {worker}"]


class Served:
    """A server of this process with the story."""

    def __init__(self, access: PageAccess, host: Doing | None = None, text: str = "boom") -> None:
        self.hub = told(story(text))
        self.host = host or Doing()
        self.site = Site(self.hub, access, self.host)
        self.server = HttpServer(self.site.answer)
        self.server.start()
        self.client = Client(f"http://127.0.0.1:{self.server.port}/")

    def close(self) -> None:
        self.site.close()
        self.server.stop()
