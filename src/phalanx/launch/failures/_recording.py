"""Records the exception that ends a worker in its error file: the ``record`` decorator and what stands behind it."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from phalanx.errors import JobStopped
from phalanx.launch.failures._error_file import (
    ENV_ERROR_FILE,
    EXIT_ENDS_JOB,
    EXIT_INCURABLE,
    write_data,
    write_error_file,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def record(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a worker's main function: an exception is written to the worker's error file, then raised on.

    Workers that ``phalanx run`` starts need no decorator; it keeps scripts working that have it, and serves commands
    that are started without Python (``--no-python``).

    >>> @record
    ... def main() -> int:
    ...     return 3
    >>> main()
    3
    """

    @functools.wraps(fn)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            record_exception(error)
            raise

    return recorded


def record_exception(error: BaseException, *, is_incurable: bool = False) -> int:
    """Write the error file of this process, unless there is none to write or an earlier error is in it.

    ``is_incurable`` says that it would come again after a restart; what cannot be imported or parsed always would, and
    what stops the job (``JobStopped``). Returns the exit code of a process that ends by it: 1, or ``EXIT_INCURABLE`` or
    ``EXIT_ENDS_JOB`` when the disk does not take the file, so that nobody restarts what would fail again.
    """
    from phalanx.launch.failures._process_failure import ChildFailedError  # start-up speed: few workers fail

    path = os.environ.get(ENV_ERROR_FILE, "")
    if isinstance(error, ChildFailedError):
        _copy_root_cause(error, path)
        return 1
    ends_job = isinstance(error, JobStopped)
    is_incurable = is_incurable or ends_job or isinstance(error, (ImportError, SyntaxError))
    is_told = write_error_file(
        path,
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        is_incurable=is_incurable,
        ends_job=ends_job,
    )
    if is_told or not is_incurable:
        return 1
    return EXIT_ENDS_JOB if ends_job else EXIT_INCURABLE


def _copy_root_cause(error: Any, path: str) -> None:
    _, failure = error.get_first_failure()
    data = failure.error_file_data
    if path and data and not os.path.exists(path):
        if isinstance(data.get("message"), dict):
            data = {**data, "message": {**data["message"], "errorCode": failure.exitcode}}
        write_data(path, data)
