"""Metadata services of three clouds on loopback, as far as notices go: the protocols, and ways to answer badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """A server whose answers a test sets: ``answer(method, path, headers) -> (status, headers, body)``."""

    def __init__(self, answer: Callable[[str, str, Any], tuple[int, dict[str, str], str]]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.trickle = 0.0
        """Seconds between the bytes of a body; 0: all at once."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                service.asked.append((self.command, self.path))
                status, headers, body = service.answer(self.command, self.path, self.headers)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    if not service.trickle:
                        self.wfile.write(body.encode())
                        return
                    for byte in body.encode():
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(service.trickle)
                except OSError:
                    self.close_connection = True  # the other side has hung up

            do_PUT = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(answer: Callable[[str, str, Any], tuple[int, dict[str, str], str]]) -> Iterator[Service]:
    service = Service(answer)
    try:
        yield service
    finally:
        service.close()


class Aws:
    """IMDSv2: no answer without a token that PUT gave out and that is still valid."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.values: dict[str, str] = {}

    def __call__(self, method: str, path: str, headers: Any) -> tuple[int, dict[str, str], str]:
        if path == "/latest/api/token":
            if method != "PUT" or not headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return 400, {}, "Bad Request"
            self.tokens.append(f"token-{len(self.tokens)}==")
            return 200, {}, self.tokens[-1]
        if not self.tokens or headers.get("X-aws-ec2-metadata-token") != self.tokens[-1]:
            return 401, {}, "Unauthorized"
        value = self.values.get(path.removeprefix("/latest/meta-data/"))
        return (404, {}, "<html>404 - Not Found</html>") if value is None else (200, {}, value)

    def expire(self) -> None:
        self.tokens.append("of nobody")


class Gcp:
    """Google's: questions and answers carry the flavor."""

    def __init__(self) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.flavor = {"Metadata-Flavor": "Google"}

    def __call__(self, method: str, path: str, headers: Any) -> tuple[int, dict[str, str], str]:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, self.flavor, "Missing Metadata-Flavor:Google header."
        value = self.values.get(path.removeprefix("/computeMetadata/v1/instance/"))
        return (404, self.flavor, "not found") if value is None else (200, self.flavor, value + "\n")


class Azure:
    """Azure's: ``Metadata: true``, an api-version, and the events of all machines of a scale set."""

    def __init__(self, name: str = "vm_1") -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []

    def add(self, kind: str, *machines: str, at: str = "Mon, 19 Sep 2016 18:29:47 GMT") -> None:
        self.events.append(
            {"EventId": f"id{len(self.events)}", "EventType": kind, "ResourceType": "VirtualMachine",
             "Resources": list(machines), "EventStatus": "Scheduled", "NotBefore": at}
        )  # fmt: skip

    def __call__(self, method: str, path: str, headers: Any) -> tuple[int, dict[str, str], str]:
        if headers.get("Metadata") != "true" or "api-version=" not in path:
            return 400, {}, '{"error": "Bad request"}'
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, {}, self.name
        if path.startswith("/metadata/scheduledevents?"):
            return 200, {}, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        return 404, {}, ""
