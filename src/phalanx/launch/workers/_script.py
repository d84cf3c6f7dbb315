"""Runs a user's file or module as ``__main__`` in this process, as ``python file`` and ``python -m module`` would.

Owns argv, the interpreter's options, the first entry of the path, the ``__main__`` module and what becomes of an
exception: the traceback on stderr without frames of ours, and the error file that the final report is made of, with or
without ``@record``.
"""

from __future__ import annotations

import builtins
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import TypeVar

from phalanx import _drop_in, protocol
from phalanx.launch.failures._recording import record_exception
from phalanx.launch.workers._after_fork import prepare_python


def run_script(target: str, args: tuple[str, ...], *, is_module: bool) -> int:
    """Run a script; return its exit code."""
    sys.argv = [target, *args]
    sys.orig_argv = interpreter_command([*(["-m"] if is_module else []), target, *args])
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    _set_first_path(directory_of(target, is_module=is_module))
    _drop_in.install_from(os.environ)
    try:
        if is_module:
            # The very function behind ``python -m``: it also sets argv[0], __spec__ and __package__.
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        else:
            _run_file(target, main)
    except SystemExit as error:
        return _code_of(_as_users_see(error))
    except BaseException as error:
        code = record_exception(_as_users_see(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else code
    return 0


def _run_file(path: str, main: ModuleType) -> None:
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")
        return
    path = os.path.join(os.getcwd(), path)  # as since 3.9: a script may change directory and still find its neighbours
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __spec__=None, __package__=None, __cached__=None, __loader__=loader)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    exec(code, main.__dict__)


def directory_of(target: str, *, is_module: bool) -> str:
    """Return what ``sys.path`` begins with for a script or module."""
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))


def interpreter_command(words: Sequence[str]) -> list[str]:
    """Return this interpreter, with the options that it was given itself (-W, -X, -O, ...) and unbuffered output."""
    given: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing's way
    options = [name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()]
    more = [word for option in options if option not in given for word in ("-X", option)]  # it passes some of these
    return [sys.executable, *given, *more, "-u", *words]


def _set_first_path(first: str) -> None:
    # sys.path[0] belongs to whoever was started first (the console script or -m); a script expects its own directory.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        if error.code:
            record_exception(error)
        return error.code
    print(error.code, file=sys.stderr)
    record_exception(error)
    return 1


_Error = TypeVar("_Error", bound=BaseException)


def _as_users_see(error: _Error) -> _Error:
    """Take the frames that called the script off an exception's traceback: users did not write them."""
    ours, trace = {__file__, runpy.__file__, "<frozen runpy>"}, error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return error.with_traceback(trace)


def main() -> None:
    """Run a worker in a fresh interpreter: ``python -m phalanx.launch.workers._script [-m] TARGET ARGS...``."""
    args = sys.argv[1:]
    is_module = args[0] == "-m"
    if is_module:
        args = args[1:]
    prepare_python(os.environ.pop("PHALANX_STACKS_FILE", ""), os.environ.pop("PHALANX_SCRATCH", ""))
    code = run_script(args[0], tuple(args[1:]), is_module=is_module)
    os.environ[protocol.ENV_EXIT_CODE] = str(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
