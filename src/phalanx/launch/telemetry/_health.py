"""Answers the health checks of schedulers: is the agent's process still doing its work?

Owns the hook (``HealthCheckServer``: derive from it for another protocol). The server is that of ``phalanx.watch``;
``--dashboard`` answers the same at ``/healthz``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from phalanx.watch._http import HttpRequest, HttpResponse, HttpServer, as_text

ENV_HEALTH_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"


class HealthCheckServer:
    """Tells others whether the agent is alive. This one does nothing.

    ``alive_callback`` returns the last time (seconds since the epoch) at which all was well; after ``timeout``
    seconds without, the agent counts as dead.
    """

    def __init__(self, alive_callback: Callable[[], float], port: int, timeout: float) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout

    @property
    def alive_callback(self) -> Callable[[], float]:
        return self._alive_callback

    @property
    def port(self) -> int:
        """The port that was asked for."""
        return self._port

    def start(self) -> None:
        """Begin to answer. An agent whose health check raises ``OSError`` here warns and goes on without it."""

    def stop(self) -> None:
        """Stop answering."""


class HTTPHealthCheckServer(HealthCheckServer):
    """Answers ``GET /`` with 200 while the agent is alive and with 503 when it is not."""

    _server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port in use, also when 0 (any) was asked for."""
        return self._server.port if self._server else self._port

    def start(self) -> None:
        server = HttpServer(self._answer, "127.0.0.1", self._port)
        server.start()
        self._server = server

    def _answer(self, request: HttpRequest) -> HttpResponse:
        age = time.time() - self._alive_callback()
        return as_text(f"last sign of life {age:.1f} s ago\n", 200 if age <= self._timeout else 503)

    def stop(self) -> None:
        if self._server:
            self._server.stop()
            self._server = None


def create_healthcheck_server(alive_callback: Callable[[], float], port: int, timeout: float) -> HealthCheckServer:
    """Return the server that agents use when the environment names a port."""
    return HTTPHealthCheckServer(alive_callback, port, timeout)


def health_server_from(environ: Mapping[str, str], alive_callback: Callable[[], float]) -> HealthCheckServer | None:
    """Return the server that the environment asks for by naming a port, if it does.

    >>> health_server_from({}, time.time) is None
    True
    """
    port = environ.get(ENV_HEALTH_PORT)
    if port is None:
        return None
    if not port.isdigit():
        raise ValueError(f"{ENV_HEALTH_PORT}={port!r}; expected a port number")
    return create_healthcheck_server(alive_callback, int(port), 60)
