"""Answers HTTP requests in threads: the one server of an agent, for people, probes and tools. Standard library only.

Owns sockets, limits and the headers that every answer has; what is answered is the caller's function. A client that is
slow, sends too much or goes away costs one thread for a bounded time and nobody else anything.
"""

from __future__ import annotations

import gzip
import ipaddress
import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from phalanx.comm import _background as background

log = logging.getLogger(__name__)

MAX_BODY = 1 << 16
PATIENCE = 30.0
"""Seconds that a client has to send its request, or to take a piece of the answer."""
WORTH_PACKING = 2_000
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
"""Of every answer; the page brings a policy of its own."""


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """What a client asks. Names of headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    client: str = ""


@dataclass(frozen=True, kw_only=True)
class HttpResponse:
    """What it is answered: ``body``, or a ``stream`` of pieces until the client goes."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Iterator[bytes] | None = None


def as_json(value: Any, status: int = 200, **headers: str) -> HttpResponse:
    """Return an answer of JSON."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return HttpResponse(status=status, body=body, headers=headers)


def as_text(text: str, status: int = 200) -> HttpResponse:
    return HttpResponse(status=status, body=text.encode(), kind="text/plain; charset=utf-8")


def error(status: int, message: str) -> HttpResponse:
    """Return an answer that says what is wrong."""
    return as_json({"error": message}, status)


class HttpServer:
    """Listens from ``start`` to ``stop``; port 0 takes a free one, see ``port``. ``OSError`` when it is taken."""

    def __init__(self, answer: Callable[[HttpRequest], HttpResponse], host: str = "127.0.0.1", port: int = 0) -> None:
        self._answer = answer
        self._address = (host, port)
        self._server: ThreadingHTTPServer | None = None

    @property
    def host(self) -> str:
        return self._address[0]

    @property
    def port(self) -> int:
        """The port in use, also when 0 (any) was asked for."""
        return int(self._server.server_address[1]) if self._server else self._address[1]

    def start(self) -> None:
        answer = self._answer

        class Handler(_Handler):
            answer_of = staticmethod(answer)

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64
            address_family = _family(self.host)

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away in the middle

            def server_bind(self) -> None:  # without asking a name server who we are
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)
                self.server_address = self.socket.getsockname()
                self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

        self._server = Listener(self._address, Handler)
        background.start(
            self._server.serve_forever, "phalanx-http", on_failure=self._failed, attempts=background.ATTEMPTS
        )

    def _failed(self, problem: BaseException) -> None:
        """Whoever probes shall get no answer, rather than wait for one."""
        log.error("the server on port %d has ended: %r", self.port, problem)
        if self._server:
            self._server.server_close()
            self._server = None

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    """Reads one request after the other of a connection, within limits."""

    answer_of: Callable[[HttpRequest], HttpResponse]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "phalanx", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_HEAD = do_GET

    def _serve(self) -> None:
        try:
            response = self._answered()
        except Exception:  # a fault of ours must not take the page away from everybody
            log.exception("the request %s %s failed", self.command, self.path.partition("?")[0])
            response = error(500, "internal error; see the agent's log")
        if response.stream is None:
            self._send(response)
        else:
            self._send_stream(response)

    def _answered(self) -> HttpResponse:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            return error(413, f"a body of {length[:20]} bytes; expected at most {MAX_BODY}, with a Content-Length")
        parts = urlsplit(self.path)
        return self.answer_of(
            HttpRequest(
                method=self.command,
                path=unquote(parts.path),
                query=dict(parse_qsl(parts.query, keep_blank_values=True)),
                headers={name.lower(): value for name, value in self.headers.items()},
                body=self.rfile.read(int(length)),
                client=str(self.client_address[0]),
            )
        )

    def _send(self, response: HttpResponse) -> None:
        body, extra = response.body, dict(response.headers)
        if len(body) > WORTH_PACKING and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, extra["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        self._head(response, {**extra, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_stream(self, response: HttpResponse) -> None:
        self.close_connection = True
        self._head(response, {**response.headers, "Connection": "close"})
        assert response.stream is not None, "the caller has looked"
        for piece in response.stream:
            self.wfile.write(piece)
            self.wfile.flush()

    def _head(self, response: HttpResponse, extra: Mapping[str, str]) -> None:
        self.send_response(response.status)
        for name, value in {**HEADERS, "Content-Type": response.kind, **extra}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def parse_address(text: str) -> tuple[str, int]:
    """Read ``[HOST:]PORT``; without a host it is this machine only.

    >>> parse_address("8080"), parse_address("0.0.0.0:0"), parse_address("[::1]:80")
    (('127.0.0.1', 8080), ('0.0.0.0', 0), ('::1', 80))
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address {text!r}; expected PORT or HOST:PORT, such as 8080 or 0.0.0.0:8080")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
