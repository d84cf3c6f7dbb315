"""Offers health checks under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.telemetry._health import HealthCheckServer, create_healthcheck_server

__all__ = [
    "HealthCheckServer",
    "create_healthcheck_server",
]
