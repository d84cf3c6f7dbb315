"""What a forked process does between the fork and the user's code: wait for its order, then become the worker.

Owns the order's fields and the worker's inner environment: variables, working directory, standard streams, CPU
affinity, stack dumps on a signal, fresh random state. Runs in a process that has no threads. An order is one of

* ``script``: a file or module, run as ``__main__`` in this very process (warm start);
* ``call``: a function, from the zygote's memory or from a pickle that the agent wrote for its own child;
* ``exec``: a command; this process image is replaced.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import io
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn

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
        raw = Output(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if stacks and (file := _open_stacks(stacks)) is not None:
        faulthandler.register(_linux.stack_signal(), file=file, all_threads=True)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # forks would all draw the zygote's numbers; Python's own module reseeds itself


def _open_stacks(path: str) -> IO[str] | None:
    """A file that stays open, since the handler writes to its descriptor; None on a disk that takes none."""
    try:
        return open(path, "a", buffering=1)
    except OSError as error:
        os.write(2, f"phalanx: stacks cannot be written to {path}: {error}\n".encode())
        return None


class Output(io.FileIO):
    """A standard stream that a full disk does not turn against the program that prints.

    A file that takes nothing more loses what is printed, and gets a line that says so once it takes some again.
    """

    _FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
    num_lost = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if self.num_lost:
                super().write(
                    f"\nphalanx: {self.num_lost} bytes of output were lost: the disk was full\n".encode()
                )
                self.num_lost = 0
            rest = view
            while rest:
                count: int | None = super().write(rest)
                if count is None:  # somebody made a console non-blocking
                    select.select([], [self], [], 1.0)
                rest = rest[count or 0 :]
        except OSError as error:
            if error.errno not in self._FULL:
                raise
            self.num_lost += len(view)
        return len(view)


def _leave(code: int) -> NoReturn:
    """End like an interpreter would: exit functions and threads first, then flush; but never hang on them twice."""
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
