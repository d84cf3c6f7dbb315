"""Brings a forked process to the user's code: it waits for its order, then becomes the worker.

Owns the order's fields and the worker's inner environment: variables, working directory, standard streams, CPU
affinity, stack dumps on a signal (what else a fork must let go of is in ``_after_fork``). Runs in a process that has no
threads. An order is one of

* ``script``: a file or module, run as ``__main__`` in this very process (warm start);
* ``call``: a function, from the zygote's memory or from a pickle that the agent wrote for its own child;
* ``exec``: a command; this process image is replaced.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from phalanx import protocol
from phalanx.launch.system import _linux
from phalanx.launch.workers._after_fork import (
    forget_caller,
    forget_zygote,
    prepare_python,
    shadowed_modules,
)
from phalanx.launch.workers._messages import receive_message

FunctionTable = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions (with their arguments) that a zygote was forked with: they need no pickling."""

EXIT_CANNOT_START = 127
"""Exit code, and with it a ``start`` error file, of a worker whose command could not be executed."""


def run_parked(orders: socket.socket, lifeline: socket.socket, functions: FunctionTable) -> NoReturn:
    """Wait for the order and carry it out; without one (the agent is gone) just end.

    ``lifeline`` carries nothing, ever. The kernel tells of bytes on ``orders`` after it has given them to us: where the
    sender's processor was taken away in between, ``die_with_peer`` on that socket would kill whom it gave its order.
    """
    received = receive_message(orders)
    orders.close()
    if received is None or not _linux.die_with_peer(lifeline):
        os._exit(0)
    order, fds = received
    fd_of = dict(zip(order["fds"], fds, strict=True))
    fd_of["agent"] = lifeline.detach()  # stays open: its other end is closed when the agent ends, however it does
    code = 1
    try:
        become_worker(order, fd_of)
        if order["kind"] == "exec":
            _exec(order, fd_of)
        code = _run(order, fd_of, functions)
    except BaseException as error:  # a fault of ours: say so and end; this process must never return into the zygote
        sys.excepthook(type(error), error, error.__traceback__)
    _leave(code)


def become_worker(order: Mapping[str, Any], fd_of: Mapping[str, int]) -> None:
    """Take on the worker's environment: what a fresh interpreter would have been started with."""
    signal.signal(_linux.stack_signal(), signal.SIG_IGN)  # its default would kill what is no Python
    usual = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
    for signum in usual:
        signal.signal(signum, signal.SIG_DFL)
    for number in order.get("ignored", ()):  # notices to the agent, which asks this process to leave in its own way
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["env"])
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
    os.set_inheritable(fd_of["agent"], True)
    command = order["command"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        from phalanx.launch.failures._error_file import write_error_file  # start-up speed

        message = f"cannot execute {command[0]!r}: {error.strerror}"
        os.write(2, f"phalanx: {message}\n".encode())
        write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), message, "", is_incurable=True)
        os._exit(EXIT_CANNOT_START)


def _run(order: Mapping[str, Any], fd_of: Mapping[str, int], functions: FunctionTable) -> int:
    if order["kind"] == "script":
        from phalanx.launch.workers._script import directory_of  # start-up speed

        _exec_if_shadowed(order, fd_of, directory_of(order["target"], is_module=order["is_module"]))
    forget_zygote()
    prepare_python(order.get("stacks", ""), order.get("scratch", ""))
    gc.unfreeze()
    if order["kind"] == "script":
        from phalanx.launch.workers._script import run_script  # start-up speed

        return run_script(order["target"], tuple(order["args"]), is_module=order["is_module"])
    from phalanx.launch.workers._call import call_and_store, load_payload  # start-up speed

    if "payload" in fd_of:
        return call_and_store(lambda: load_payload(fd_of["payload"]), fd_of["result"])
    forget_caller(order["env"])
    return call_and_store(lambda: functions[order["function"]], fd_of["result"])


def _exec_if_shadowed(order: Mapping[str, Any], fd_of: Mapping[str, int], directory: str) -> None:
    """Give a script whose own modules have the names of loaded ones a fresh interpreter, where they come
    first."""
    shadowed = shadowed_modules(directory)
    if not shadowed or "command" not in order:
        return
    if order["env"].get("LOCAL_RANK") == "0":
        names = ", ".join(os.path.basename(path) for path in shadowed)
        os.write(
            2,
            f"phalanx: {names} in {directory}: a module of that name is loaded already, so that warm start would hide "
            "it; a fresh interpreter is started instead (rename it for a faster start)\n".encode(),
        )
    os.environ.update({"PHALANX_STACKS_FILE": order["stacks"], "PHALANX_SCRATCH": order["scratch"]})
    _exec(order, fd_of)


def _leave(code: int) -> NoReturn:
    """End like an interpreter would: exit functions and threads first, then flush; but never hang on them twice."""
    os.environ[protocol.ENV_EXIT_CODE] = str(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads, as a normal exit does
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
