"""Offers the choice of an error handler under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.failures._recording import get_error_handler

__all__ = [
    "get_error_handler",
]
