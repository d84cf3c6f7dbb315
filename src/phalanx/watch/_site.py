"""Answers the requests of an agent's server: probes, metrics, the API, the stream of events, the page.

Owns the table of paths (``ROUTES``), which ``docs/watch-metrics.md`` explains. Version 1 of the API: fields may be
added, none is taken away or changes its meaning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from phalanx.watch._access import COOKIE, PageAccess, Refused
from phalanx.watch._http import HttpRequest, HttpResponse, as_json, as_text, error
from phalanx.watch._hub import Hub
from phalanx.watch._page_file import page_html, page_policy
from phalanx.watch._prometheus import CONTENT_TYPE, exposition
from phalanx.watch._report import with_details
from phalanx.watch._view import JobView

API = "/api/v1/"
PULSE = 10.0
"""Seconds after which a stream without events says that it lives."""
MAX_STREAMS = 64
FRESH = 5.0
"""Seconds for which a view stays as it is while no event comes."""
ALIVE = 60.0
"""Seconds without a sign of life of the agent's loop after which it counts as dead."""


class Host(Protocol):
    """What the process that serves knows beyond the events."""

    def catch_up(self) -> None:
        """Have the hub know what has been told until now."""

    def alive_at(self) -> float:
        """Return when its work last went on (seconds since 1970)."""

    def tail(self, worker: str) -> list[str]:
        """Return the last lines that a worker of this node wrote to stderr."""

    def logs(self, rank: str, node: str, since: str) -> dict[str, Any]:
        """Return what workers of this node wrote to their log files since then; ``ValueError`` says why not."""

    def audit(self) -> dict[str, Any]:
        """Return what the audit of the job says."""

    def act(self, action: str, wish: dict[str, Any], by: str) -> str:
        """Do what was asked for; in words. ``ValueError`` says why not."""

    def metrics(self) -> str:
        """Return further metrics, in Prometheus' format."""


class NoHost:
    """Of a job that is only looked at: it runs elsewhere, or has ended."""

    def catch_up(self) -> None:
        pass

    def alive_at(self) -> float:
        return time.time()

    def tail(self, worker: str) -> list[str]:
        return []

    def logs(self, rank: str, node: str, since: str) -> dict[str, Any]:
        raise ValueError("this page shows no log files; ask an agent of the job, or read its log directory")

    def audit(self) -> dict[str, Any]:
        return {}

    def act(self, action: str, wish: dict[str, Any], by: str) -> str:
        raise ValueError("this page only shows the job; ask an agent of it, or use the commands")

    def metrics(self) -> str:
        return ""


View = Callable[[JobView, float], Any]
VIEWS: dict[str, View] = {
    "summary": lambda view, now: view.summary(now),
    "workers": lambda view, now: view.workers(),
    "rounds": lambda view, now: list(view.lifelines.rounds),
    "series": lambda view, now: view.curve.rows(),
    "steptimes": lambda view, now: view.heat.to_record(),
    "commits": lambda view, now: view.commits(),
    "goodput": lambda view, now: view.summary(now)["goodput"],
    "incidents": lambda view, now: [one.to_record() for one in view.incidents.found],
    "saves": lambda view, now: view.saves_record(now),
    "nodes": lambda view, now: view.nodes(),
    "copies": lambda view, now: view.copies_record(),
    "page": lambda view, now: view.page(now),
}
"""What lies under /api/v1/ and is made of the events alone."""


class Site:
    """Everything that one server answers."""

    def __init__(self, hub: Hub, access: PageAccess, host: Host | None = None) -> None:
        self._hub = hub
        self._access = access
        self._host: Host = host or NoHost()
        self.num_streams = 0
        """Clients that follow the events just now."""
        self._lock = threading.Lock()
        self._is_closing = threading.Event()

    def close(self) -> None:
        """End the streams."""
        self._is_closing.set()

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the answer to any request."""
        try:
            if request.path == "/healthz":  # probes bring no token
                return self._health()
            if request.path == "/" and "token" in request.query:
                return self._let_in(request.query["token"])
            self._access.check_look(request)
            if request.method == "POST":
                return self._change(request)
            return self._look(request)
        except Refused as refused:
            return error(refused.status, str(refused))

    def _look(self, request: HttpRequest) -> HttpResponse:
        path = request.path
        if path != "/":
            self._host.catch_up()
        if path == "/":
            return HttpResponse(
                body=page_html().encode(),
                kind="text/html; charset=utf-8",
                headers={"Content-Security-Policy": page_policy() + "; frame-ancestors 'none'"},
            )
        if path == "/metrics":
            text = self._hub.read(lambda view: exposition(view, self._hub.now())) + self._host.metrics()
            return HttpResponse(body=text.encode(), kind=CONTENT_TYPE)
        if path == "/events":
            return self._stream(request)
        if path.startswith(API):
            return self._api(path.removeprefix(API), request)
        return error(404, f"nothing at {path[:100]!r}; the API is at {API}")

    def _api(self, name: str, request: HttpRequest) -> HttpResponse:
        now = self._hub.now()
        if name in VIEWS:
            if request.headers.get("if-none-match") == self._tag:
                return HttpResponse(status=304, headers={"ETag": self._tag})
            began = time.perf_counter()
            found = self._hub.read(lambda view: VIEWS[name](view, now))
            if name == "page":
                if "details" in request.query:
                    found = self._hub.read(with_details)
                found |= {"last_event": self._last_id, "can_act": self._access.can_change, "live": True}
                found["cost_ms"] = round(1e3 * (time.perf_counter() - began), 1)
            return as_json(found, ETag=self._tag)
        if name.startswith("worker/"):
            return self._worker(name.removeprefix("worker/"))
        if name == "events":
            since, limit = _number(request, "since", 0), _number(request, "limit", 1000)
            which = _which(request)
            events = self._hub.after(since, limit=min(limit, 10_000), **which)
            lines = ",".join(f'{{"number":{event.number},"event":{event.line}}}' for event in events)
            head = f'"hub":"{self._hub.name}","forgotten":{self._hub.num_forgotten(**which)}'
            return HttpResponse(body=f'{{{head},"events":[{lines}]}}'.encode())
        if name == "logs":
            asked = (request.query.get(key, "") for key in ("rank", "node", "since"))
            try:
                return as_json(self._host.logs(*asked))
            except ValueError as problem:
                return error(409, str(problem))
        if name == "audit":
            return as_json(self._host.audit())
        if name == "nonce":
            return as_json({"nonce": self._access.nonce()})
        return error(
            404,
            f"nothing at {API}{name[:100]}; there are {', '.join([*VIEWS, 'worker/ID', 'events', 'logs', 'audit'])}",
        )

    @property
    def _tag(self) -> str:
        """Return the tag of all views; it changes with time too, since silence changes what is shown."""
        return f'"{self._last_id}-{int(self._hub.now() / FRESH)}"'

    @property
    def _last_id(self) -> str:
        return f"{self._hub.name}-{self._hub.number}"

    def _worker(self, worker: str) -> HttpResponse:
        life = self._hub.read(lambda view: view.lifelines.lives.get(worker) and view.lifelines.lives[worker].detail())
        if life is None:
            return error(404, f"no worker {worker[:100]!r}")
        if not life["stderr"]:
            life["stderr"] = self._host.tail(worker)
        return as_json(life)

    def _health(self) -> HttpResponse:
        age = time.time() - self._host.alive_at()
        return as_text(f"last sign of life {age:.1f} s ago\n", 200 if age <= ALIVE else 503)

    def _let_in(self, token: str) -> HttpResponse:
        """Keep the token of the printed address in a cookie, and out of the address bar."""
        if not self._access.is_token(token):
            raise Refused(401, "this is not the token of this job")
        cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
        return HttpResponse(status=303, headers={"Location": "/", "Set-Cookie": cookie})

    def _change(self, request: HttpRequest) -> HttpResponse:
        action = request.path.removeprefix(f"{API}actions/")
        if not request.path.startswith(f"{API}actions/"):
            return error(404, f"nothing to POST to at {request.path[:100]!r}")
        wish = self._access.check_change(request, action)
        try:
            return as_json({"done": self._host.act(action, wish, f"the page, from {request.client}")})
        except ValueError as problem:
            return error(409, str(problem))

    # -- the stream -------------------------------------------------------------------------------------------

    def _stream(self, request: HttpRequest) -> HttpResponse:
        if self.num_streams >= MAX_STREAMS:
            return error(503, f"{MAX_STREAMS} clients follow the events already")
        pieces = self._pieces(self._where(request), {**_which(request), "local": "local" in request.query})
        return HttpResponse(stream=pieces, kind="text/event-stream; charset=utf-8")

    def _where(self, request: HttpRequest) -> int:
        """Return the number after which to go on; that of another hub says nothing here."""
        given = request.headers.get("last-event-id") or request.query.get("since", "")
        hub, _, number = given.rpartition("-")
        return int(number) if number.isdecimal() and len(number) < 16 and hub in ("", self._hub.name) else 0

    def _pieces(self, number: int, which: dict[str, Any]) -> Iterator[bytes]:
        self._count_stream(1)
        try:
            self._host.catch_up()  # which knows now that somebody follows
            yield b"retry: 1000\n\n"
            while True:
                is_last, last = self._is_closing.is_set(), self._hub.number
                for event in self._hub.after(number, **which):
                    data = f"id: {self._hub.name}-{event.number}\nevent: {event.kind}\ndata: {event.line}\n\n"
                    yield data.encode()
                number = max(number, last)
                if is_last:
                    return
                if not self._hub.wait(number, PULSE):
                    yield b": alive\n\n"
        finally:
            self._count_stream(-1)

    def _count_stream(self, change: int) -> None:
        with self._lock:
            self.num_streams += change


def _number(request: HttpRequest, name: str, default: int) -> int:
    text = request.query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else default


def _which(request: HttpRequest) -> dict[str, Any]:
    """Return which events are asked for: ``kinds=a,b`` (all), ``without=a,b`` (none), ``bulk``."""
    named = {key: frozenset(filter(None, request.query.get(key, "").split(","))) for key in ("kinds", "without")}
    return {**named, "bulk": "bulk" in request.query}
