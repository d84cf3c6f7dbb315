"""Offers what a worker says of its failure under the path that users of torch know."""

from __future__ import annotations

from phalanx.launch.failures._process_failure import ChildFailedError, ProcessFailure
from phalanx.launch.failures._recording import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
