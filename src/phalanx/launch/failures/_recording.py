"""Records the exception that ends a worker in its error file: the ``record`` decorator and what stands behind it."""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from phalanx.errors import DoNotRetry, JobStopped, WrongBits
from phalanx.launch.failures._error_file import (
    ENV_ERROR_FILE,
    EXIT_DO_NOT_RETRY,
    EXIT_ENDS_JOB,
    EXIT_INCURABLE,
    read_error_file,
    write_data,
    write_error_file,
)

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ErrorHandler:
    """Tells the agent why this process failed, by its error file. Derive from it and give it to ``record`` to do more:
    override ``initialize`` and ``record_exception``."""

    def initialize(self) -> None:
        """Called before the decorated function: crashes in native code leave a Python stack on stderr."""
        try:
            faulthandler.enable(all_threads=True)
        except (OSError, RuntimeError, ValueError) as error:  # stderr is closed, or has no descriptor
            log.warning("a crash will leave no stack: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Called with the exception that ends the function."""
        record_exception(e)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Called when the function's own workers have failed: their first error becomes the error of this process."""
        data = read_error_file(rootcause_error_file)
        if data is None:
            log.warning(
                "the error file of the root cause, %s, cannot be read; it is not passed on", rootcause_error_file
            )
            return
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, data, error_code)
        path = self._get_error_file_path()
        if path:
            write_data(path, data)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the exit code, which a process that was killed could not know, into what it has written."""
        if isinstance(rootcause_error.get("message"), dict):
            rootcause_error["message"]["errorCode"] = error_code
        else:
            log.warning("the error file %s has no place for the exit code %d", rootcause_error_file, error_code)

    def _get_error_file_path(self) -> str | None:
        return os.environ.get(ENV_ERROR_FILE)


def get_error_handler() -> ErrorHandler:
    """Return what ``record`` uses when it is given nothing else."""
    return ErrorHandler()


def record(fn: Callable[_P, _R], error_handler: ErrorHandler | None = None) -> Callable[_P, _R | None]:
    """Decorate a worker's main function: an exception is written to the worker's error file, then raised on.

    Workers that ``phalanx run`` starts need no decorator; it keeps scripts working that have it, and serves commands
    that are started without Python (``--no-python``). ``sys.exit(0)`` is a return.

    >>> @record
    ... def main() -> int:
    ...     return 3
    >>> main()
    3
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        from phalanx.launch.failures._process_failure import ChildFailedError  # start-up speed: few workers fail

        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as exit:
            if exit.code == 0:
                return None
            raise
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if os.path.exists(failure.error_file):
                handler.dump_error_file(failure.error_file, failure.exitcode)
            else:  # the failure of another machine, whose file came as a record
                handler.record_exception(error)
            raise
        except Exception as error:
            handler.record_exception(error)
            raise

    return recorded


def record_exception(error: BaseException, *, is_incurable: bool = False) -> int:
    """Write the error file of this process, unless there is none to write or an earlier error is in it.

    ``is_incurable`` says that it would come again after a restart; what cannot be imported or parsed always would, and
    what stops the job (``JobStopped``). Returns the exit code of a process that ends by it: 1; for ``DoNotRetry``
    ``EXIT_DO_NOT_RETRY``; and ``EXIT_INCURABLE`` or ``EXIT_ENDS_JOB`` when the disk does not take the file, so that
    nobody restarts what would fail again.
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
        has_wrong_bits=isinstance(error, WrongBits),
    )
    if isinstance(error, DoNotRetry):
        return EXIT_DO_NOT_RETRY
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
