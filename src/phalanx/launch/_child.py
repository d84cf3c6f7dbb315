"""What a forked process does between the fork and the user's code: wait for its order, then become the worker.

Owns the order's fields and the worker's inner environment: variables, working directory, standard streams, CPU
affinity, stack dumps on a signal, fresh random state. Runs in a process that has no threads. An order is one of

* ``script``: a file or module, run as ``__main__`` in this very process (warm start);
* ``call``: a function, from the zygote's memory or from a pickle that the agent wrote for its own child;
* ``exec``: a command; this process image is replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from phalanx import membership
from phalanx.launch import _linux
from phalanx.launch._messages import receive_message

FunctionTable = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions (with their arguments) that a zygote was forked with: they need no pickling."""

EXIT_CANNOT_START = 127
"""Exit code, and with it a ``start`` error file, of a worker whose command could not be executed."""


def run_parked(orders: socket.socket, functions: FunctionTable) -> NoReturn:
    """Wait for the order and carry it out; without one (the agent is gone) just end."""
    received = receive_message(orders)
    orders.close()
    if received is None:
        os._exit(0)
    order, fds = received
    fd_of = dict(zip(order["fds"], fds, strict=True))
    code = 1
    try:
        become_worker(order, fd_of)
        if order["kind"] == "exec":
            _exec(order, fd_of)
        code = _run(order, fd_of, functions)
    except (
        BaseException
    ) as error:  # a fault of ours: say so and end; this process must never return into the zygote
        sys.excepthook(type(error), error, error.__traceback__)
    _leave(code)


def become_worker(order: Mapping[str, Any], fd_of: Mapping[str, int]) -> None:
    """Take on the worker's environment: what a fresh interpreter would have been started with."""
    signal.signal(_linux.stack_signal(), signal.SIG_IGN)  # its default would kill what is no Python
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["env"])
    for name in order["unset"]:
        os.environ.pop(name, None)
    for name, target in (("stdout", 1), ("stderr", 2)):
        if name in fd_of:
            os.dup2(fd_of[name], target)
            os.close(fd_of[name])
    os.chdir(order["cwd"])
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])
    _linux.set_process_name(order["name"])


def _exec(order: Mapping[str, Any], fd_of: Mapping[str, int]) -> NoReturn:
    for signum in (signal.SIGPIPE, signal.SIGINT, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
        signal.signal(signum, signal.SIG_DFL)
    for name in ("payload", "result"):
        if name in fd_of:
            os.set_inheritable(fd_of[name], True)
            os.environ[f"PHALANX_{name.upper()}_FD"] = str(fd_of[name])
    command = order["command"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        from phalanx.launch._record import write_error_file

        message = f"cannot execute {command[0]!r}: {error.strerror}"
        os.write(2, f"phalanx: {message}\n".encode())
        write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), message, "", is_incurable=True)
        os._exit(EXIT_CANNOT_START)


def _run(order: Mapping[str, Any], fd_of: Mapping[str, int], functions: FunctionTable) -> int:
    prepare_python(order.get("stacks", ""))
    gc.unfreeze()
    if order["kind"] == "script":
        from phalanx.launch._script import run_script

        return run_script(order["target"], tuple(order["args"]), is_module=order["is_module"])
    from phalanx.launch._call import call_and_store, load_payload

    if "payload" in fd_of:
        return call_and_store(lambda: load_payload(fd_of["payload"]), fd_of["result"])
    return call_and_store(lambda: functions[order["function"]], fd_of["result"])


def prepare_python(stacks: str) -> None:
    """Make a forked interpreter behave as a fresh, unbuffered one, and let it dump its stacks on a signal."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - lives as long as the process
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if stacks:
        file = open(stacks, "a", buffering=1)  # noqa: SIM115 - must stay open: the handler writes to its descriptor
        faulthandler.register(_linux.stack_signal(), file=file, all_threads=True)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # forks would all draw the zygote's numbers; Python's own module reseeds itself


def _leave(code: int) -> NoReturn:
    """End like an interpreter would: exit functions and threads first, then flush; but never hang on them twice."""
    os.environ[membership.ENV_EXIT_CODE] = str(code)
    try:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads, as a normal exit does
        import atexit

        atexit._run_exitfuncs()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code & 0xFF)
