"""Calls the function of a function worker, and brings its value or exception home whole.

Owns the result file: a descriptor that the agent opened and only its own child writes (an anonymous file, so that
large values need nobody to read along). Pickle is used here and nowhere else, and only between an agent and the
processes it started itself: never across machines, never from a path that others can write. Plain pickle, not
multiprocessing's: that one would send a tensor as a handle to memory which dies with the worker.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from phalanx import protocol
from phalanx.launch.failures._recording import record_exception
from phalanx.launch.workers._after_fork import prepare_python


def open_anonymous() -> int:
    """Open an unnamed file: in memory on Linux, unlinked on disk elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("phalanx", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_payload(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Write what ``load_payload`` reads in the child. ``TypeError`` when something cannot be pickled."""
    try:
        body = pickle.dumps((fn, args))
    except Exception as error:  # pickle raises whatever an object's __reduce__ raises
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"the function {name} or its arguments cannot be pickled ({type(error).__name__}: {error}); "
            "define it at the top of a module, or use start_method='fork'"
        ) from error
    fd = open_anonymous()
    wanted = spawn.get_preparation_data("phalanx-worker")
    wanted.pop("authkey", None)  # refuses to be pickled, and no child of ours needs it
    preparation = pickle.dumps(wanted)
    with open(fd, "wb", closefd=False) as file:
        file.write(len(preparation).to_bytes(8, "big") + preparation + body)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def load_payload(fd: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and its arguments; first makes the caller's ``__main__`` importable, as multiprocessing
    does."""
    with open(fd, "rb") as file:
        file.seek(0)
        preparation = pickle.loads(file.read(int.from_bytes(file.read(8), "big")))
        spawn.prepare(preparation)
        fn, args = pickle.loads(file.read())
    return fn, args


def call_and_store(load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], result_fd: int) -> int:
    """Call the function and write its outcome; the process's exit code."""
    try:
        fn, args = load()
        value = fn(*args)
    except SystemExit as error:
        if error.code in (None, 0):
            return _store(result_fd, ("value", None), "its return value")
        record_exception(error)
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        code = record_exception(error)
        sys.excepthook(type(error), error, error.__traceback__)
        _store(result_fd, ("error", error), "its exception", is_fatal=False)
        return code
    return _store(result_fd, ("value", value), "its return value")


def _store(fd: int, outcome: tuple[str, Any], what: str, *, is_fatal: bool = True) -> int:
    try:
        data = pickle.dumps(outcome)
    except Exception as error:  # see write_payload
        if is_fatal:
            kind = type(outcome[1]).__name__
            problem = TypeError(f"the worker function ended well, but {what}, a {kind}, cannot be pickled: {error}")
            record_exception(problem, is_incurable=True)  # the function would return the same again
            sys.excepthook(type(problem), problem, None)
        return 1
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return 0


def read_result(fd: int) -> tuple[str, Any] | None:
    """Read ``("value", v)``, ``("error", e)``, ``("unreadable", why)``, or None when the worker wrote nothing."""
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        data = file.read()
    if not data:
        return None
    try:
        kind, value = pickle.loads(data)
    except Exception as error:  # a class with a custom __init__ may pickle but not unpickle
        return "unreadable", f"{type(error).__name__}: {error}"
    return kind, value


def main() -> None:
    """Run a function worker in a fresh interpreter (start_method ``spawn``)."""
    payload = int(os.environ.pop("PHALANX_PAYLOAD_FD"))
    result = int(os.environ.pop("PHALANX_RESULT_FD"))
    for fd in (payload, result):
        os.set_inheritable(fd, False)
    prepare_python(os.environ.pop("PHALANX_STACKS_FILE", ""), os.environ.pop("PHALANX_SCRATCH", ""))
    code = call_and_store(lambda: load_payload(payload), result)
    os.environ[protocol.ENV_EXIT_CODE] = str(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
