"""Error files: how a worker tells its agent what went wrong before it dies.

Owns the file's format (the JSON that torch's tools write and read: message, extraInfo with py_callstack and
timestamp) and ``record``. The first error of a process wins: a later one is most often its consequence.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from phalanx.errors import JobStopped

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

EXIT_INCURABLE, EXIT_ENDS_JOB = 183, 184
"""How a process says that it would fail again, or all others with it, when the disk takes no error file."""

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
    from phalanx.launch.failures._process_failure import ChildFailedError
    from phalanx.launch.workers._script import user_traceback

    path = os.environ.get(ENV_ERROR_FILE, "")
    if isinstance(error, ChildFailedError):
        _copy_root_cause(error, path)
        return 1
    ends_job = isinstance(error, JobStopped)
    is_incurable = is_incurable or ends_job or isinstance(error, (ImportError, SyntaxError))
    is_told = write_error_file(
        path,
        f"{type(error).__name__}: {error}",
        user_traceback(error),
        is_incurable=is_incurable,
        ends_job=ends_job,
    )
    if is_told or not is_incurable:
        return 1
    return EXIT_ENDS_JOB if ends_job else EXIT_INCURABLE


def write_error_file(
    path: str, message: str, stack: str, *, is_incurable: bool, ends_job: bool = False
) -> bool:
    """Write one error file; False when the disk does not take it.

    ``is_incurable`` marks what no restart can cure, ``ends_job`` what no survivor can.
    """
    if not path or os.path.exists(path):
        return True
    data = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
        },
        "phalanx": {"time": time.time(), "is_incurable": is_incurable, "ends_job": ends_job},
    }
    return _write(path, data)


def read_error_file(path: str) -> dict[str, Any] | None:
    """The content, or None when the worker left none (or was killed while writing it)."""
    try:
        with open(path) as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _copy_root_cause(error: Any, path: str) -> None:
    _, failure = error.get_first_failure()
    data = failure.error_file_data
    if path and data and not os.path.exists(path):
        if isinstance(data.get("message"), dict):
            data = {**data, "message": {**data["message"], "errorCode": failure.exitcode}}
        _write(path, data)


def _write(path: str, data: dict[str, Any]) -> bool:
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            json.dump(data, file)
        os.replace(temporary, path)
        return True
    except OSError as problem:
        with suppress(OSError):
            os.write(2, f"phalanx: cannot write error file {path}: {problem}\n".encode())
        with suppress(OSError):
            os.unlink(temporary)
    return False
