"""Runs ``phalanx run``: from flags to a launched job, from its end to an exit code.

Owns the order of things that makes the start fast. Flags are read before anything heavy is imported; then torch's
native library is loaded beside (``_head_start``) while the agent's modules are imported, none of which needs torch;
torch itself comes last, once, and the zygote is forked before the first thread that stays. Exit codes: 0 all workers
succeeded, 1 the job failed, 2 the command line was wrong, 93 it failed and should not be tried again, 128+n ended by
signal n.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.launch.cli._flags import UsageError, parse
from phalanx.launch.cli._head_start import begin_to_load, find_library
from phalanx.launch.workers._worker_environment import resolver_defaults, thread_defaults

if TYPE_CHECKING:
    from phalanx.launch.config._config import LaunchConfig


def main(argv: Sequence[str], *, gives_local_rank: bool = False) -> int:
    """Run ``phalanx run`` with these arguments; the exit code. ``gives_local_rank``: see ``parse``."""
    wait_loaded: Callable[[], None] = lambda: None  # noqa: E731 - replaced below
    try:
        args = parse(argv, os.environ, gives_local_rank=gives_local_rank)
        _check_script(args)
        local_size = local_world_size(args.nproc_per_node)
        # Before OpenMP is loaded and the first name resolved: they look only then.
        os.environ.update(thread_defaults(local_size, os.environ) | resolver_defaults(os.environ))
        wait_loaded = begin_to_load(find_library())
        from phalanx.launch.cli._from_flags import config_from_args  # start-up: while the library loads

        config = config_from_args(args, local_size)
    except (ValueError, NotADirectoryError) as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        wait_loaded()  # a process must not end while a library's constructors run
        return 2
    return _launch(config, args, wait_loaded)


def _launch(config: LaunchConfig, args: argparse.Namespace, wait_loaded: Callable[[], None]) -> int:
    from phalanx.launch.workers._zygote import quiet_imports  # start-up: while the library loads

    try:
        with quiet_imports():
            import logging  # start-up: this and what follows while the library loads

            # start-up: none of them needs torch
            from phalanx.launch.agent._launch import run_node
            from phalanx.launch.cli._from_flags import entrypoint_from_args
            from phalanx.launch.failures._error_file import EXIT_DO_NOT_RETRY
            from phalanx.launch.failures._process_failure import ChildFailedError
            from phalanx.launch.rendezvous import RendezvousError, _backends  # noqa: F401 - else loaded late
            from phalanx.launch.system._signals import SignalException
            from phalanx.launch.workers import _script  # noqa: F401 - what a forked worker needs first
            from phalanx.launch.workers._processes import ProcessStartError, Zygote
            from phalanx.launch.workers._start import WorkerStart
            from phalanx.launch.workers._zygotes import WARM_IMPORTS, warm_imports

            for name in WARM_IMPORTS:  # last: all of the above can do without torch
                importlib.import_module(name)
    finally:
        wait_loaded()  # no thread is left when the zygote is forked
    entrypoint, words = entrypoint_from_args(args)
    try:
        config = config.resolved()
        start = WorkerStart(entrypoint=entrypoint, args=tuple(words), method=config.start_method)
        zygote = Zygote.fork({}, warm_imports(config) if start.is_warm else ())
        # After the fork: workers start without a handler, so that their scripts' basicConfig() works.
        logging.basicConfig(format="phalanx: %(message)s", level=os.environ.get("PHALANX_LOGLEVEL", "WARNING").upper())
        run_node(config, start, zygote=zygote)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return EXIT_DO_NOT_RETRY if error.get_first_failure()[1].is_not_to_be_retried else 1
    except SignalException as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        return 128 + error.sigval
    except (RendezvousError, ProcessStartError, ValueError) as error:
        print(f"phalanx run: {error}", file=sys.stderr)
        return 1
    return 0


def local_world_size(text: str) -> int:
    """Return the number of workers of this node; ``auto``, ``cpu``, ``gpu`` and ``xpu`` look at the machine."""
    if text.isdigit():
        count = int(text)
        if count < 1:
            raise UsageError(f"--nproc-per-node {text}; expected at least 1")
        return count
    if text == "cpu":
        return _usable_cpus()
    if text not in ("auto", "gpu", "xpu"):
        raise UsageError(f"--nproc-per-node {text}; expected a number, auto, cpu, gpu or xpu")
    devices = _count_devices(text)
    if devices:
        return devices
    if text == "auto":
        return _usable_cpus()
    raise UsageError(f"--nproc-per-node {text}: this machine has no such device that torch can use")


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_devices(kind: str) -> int:
    """Asked in another process: a process that has touched a device driver must not fork workers."""
    import subprocess  # start-up speed: seldom needed

    question = f"from phalanx._devices import count_usable; print(count_usable({kind!r}))"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    words = answer.stdout.split()
    return int(words[-1]) if words and words[-1].isdigit() else 0


def _check_script(args: argparse.Namespace) -> None:
    """Notice a script that is not there before anything is started for it."""
    script = args.training_script
    if args.module and args.no_python:
        raise UsageError("--module and --no-python exclude each other")
    if args.no_python and not args.run_path:
        import shutil  # start-up speed: seldom needed

        if shutil.which(script) is None:
            raise UsageError(f"command {script!r} was not found or may not be executed")
    elif args.module:
        top = script.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            if importlib.util.find_spec(top) is None:
                raise UsageError(f"module {script!r} was not found on the path")
        finally:
            sys.path.pop(0)
    elif not os.path.exists(script):
        raise UsageError(f"script {script!r} does not exist (working directory: {os.getcwd()})")
