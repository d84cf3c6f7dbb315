"""Offers where events go under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.events import get_logging_handler

__all__ = [
    "get_logging_handler",
]
