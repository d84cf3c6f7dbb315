"""Offers what writes a worker's error file under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.failures._recording import ErrorHandler

__all__ = [
    "ErrorHandler",
]
