"""Puts right, before the user's code runs, what a forked worker has that a fresh interpreter would not.

Owns the list. Guarantees: a script under warm start finds what ``python -u script`` gives it, apart from modules that
are imported already and what importing them does (a test compares the two, field by field); a function that is
forked with its caller's memory keeps the caller's objects, but neither its exit functions nor its random numbers.
Assumptions: the process has one thread; the zygote itself has configured nothing (logging, warnings, signals that it
does not restore): what is never set up need not be taken back.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import importlib.machinery
import io
import os
import select
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from phalanx.launch.system import _linux

_OMP_PAUSE_HARD = 2
_LONGEST_FOLDER = 80
"""Bytes of a folder's name in which the name of a Unix socket (108 in all) can still end, and some to spare."""
_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_ALWAYS_THERE = frozenset({"__main__", "encodings", "phalanx", "site", "sitecustomize", "usercustomize"})
"""Loaded before any script could offer its own; phalanx is what the worker runs in."""


class Output(io.FileIO):
    """Writes a standard stream that never raises for want of room.

    A file that takes nothing more loses what is printed, and gets a line that says so once it takes some again.
    """

    _FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
    num_lost = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if self.num_lost:
                super().write(f"\nphalanx: {self.num_lost} bytes of output were lost: the disk was full\n".encode())
                self.num_lost = 0
            rest = view
            while rest:
                count: int | None = super().write(rest)
                if count is None:  # somebody made a console non-blocking
                    poller = select.poll()  # select.select takes no descriptor above 1023
                    poller.register(self, select.POLLOUT)
                    poller.poll(1000)
                rest = rest[count or 0 :]
        except OSError as error:
            if error.errno not in self._FULL:
                raise
            self.num_lost += len(view)
        return len(view)


def prepare_python(stacks: str, scratch: str) -> None:
    """Give a worker streams as ``python -u`` has them, stacks on a signal, and a place for what is left over."""
    open_streams()
    if scratch:
        keep_sockets_in(scratch)
    if stacks:
        try:  # it stays open: the handler writes to it
            fd = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:  # a disk that takes no more files
            print(f"phalanx: stacks cannot be written to {stacks}: {error}", file=sys.stderr)
        else:
            faulthandler.register(_linux.stack_signal(), file=fd, all_threads=True)


def open_streams() -> None:
    """Open standard output and error as ``python -u`` has them, on descriptors that may have changed under the old
    ones.

    Text that the encoding cannot express is written with backslashes: a print must not end a job. Whoever names an
    error handler in PYTHONIOENCODING gets that one on standard output.
    """
    wanted = "" if sys.flags.ignore_environment else os.environ.get("PYTHONIOENCODING", "").partition(":")[2]
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, f"__{name}__")
        raw: Any = Output(number, "w", closefd=False)
        raw.name = f"<{name}>"
        stream: Any = io.TextIOWrapper(
            raw,
            encoding="utf-8" if old is None else old.encoding,
            errors=wanted if wanted and name == "stdout" else "backslashreplace",
            write_through=True,
        )
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def forget_zygote() -> None:
    """Let go of what every fork shares with the zygote and its siblings."""
    _renew_random()
    if hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # before 3.12 that of the parent
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None and tempfile.tempdir in tempfile._candidate_tempdir_list():
        tempfile.tempdir = None  # asked for by some import: TMPDIR, which the script may set, shall be read again


def keep_sockets_in(folder: str) -> None:
    """Say where multiprocessing of this process and its forks has its sockets: a killed loader cannot remove its
    own."""
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return  # multiprocessing makes one with a shorter name
    from multiprocessing import process  # start-up speed

    process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def forget_caller(env: Mapping[str, str]) -> None:
    """Let go of what a copy of the calling process must not do in its place: above all, what that does at its end.

    Its exit functions would delete the caller's temporary directories and close its sessions. multiprocessing's own
    objects (queues, locks) are told that they live in a new process, so that they work in it; torch of the number of
    threads that a fresh interpreter would read from ``env``, which the launcher sets.
    """
    atexit._clear()
    logging = sys.modules.get("logging")
    if logging is not None:
        atexit.register(logging.shutdown)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers it again
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)
    torch, threads = sys.modules.get("torch"), env.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdecimal():
        torch.set_num_threads(max(1, int(threads)))


def prepare_fork() -> None:
    """Prepare a process that has computed to be forked: end the idle threads of GNU OpenMP.

    A fork has none of them, but its libgomp believes that it does, and waits for them for ever in the first operation
    that uses several threads (seen). Here they come back when next needed.
    """
    for path in _loaded_libraries("libgomp"):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)


def _loaded_libraries(prefix: str) -> set[str]:
    try:
        with open("/proc/self/maps") as file:
            paths = {line.rstrip("\n").partition("/")[2] for line in file}
    except OSError:
        return set()  # no Linux: no GNU OpenMP in torch either
    return {f"/{path}" for path in paths if os.path.basename(path).startswith(prefix)}


def _renew_random() -> None:
    """Forks would all draw the zygote's numbers; Python's own module has seeded itself anew."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()


def shadowed_modules(directory: str) -> list[str]:
    """Return files of a script's directory that ``import`` would take for a module that is loaded already, from
    elsewhere.

    A fresh interpreter would find the script's own first.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    loaded = {name for name in sys.modules if "." not in name} - _ALWAYS_THERE
    found = []
    for entry in entries:
        name = entry.name.partition(".")[0]
        if name in loaded and _is_importable(entry) and _comes_from_elsewhere(name, directory):
            found.append(entry.path)
    return sorted(found)


def _is_importable(entry: os.DirEntry[str]) -> bool:
    stem = entry.name.partition(".")[0]
    if any(entry.name == stem + suffix for suffix in _SUFFIXES):
        return True
    return entry.name == stem and os.path.isfile(os.path.join(entry.path, "__init__.py"))


def _comes_from_elsewhere(name: str, directory: str) -> bool:
    for finder in (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter):
        if finder.find_spec(name) is not None:
            return False  # found before the path is looked at, in a fresh interpreter too
    origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
    if not isinstance(origin, str):
        return False
    home = os.path.dirname(os.path.realpath(origin))
    if os.path.basename(origin).startswith("__init__."):
        home = os.path.dirname(home)
    return home != os.path.realpath(directory)
