"""Writes the state of its interpreter, field by field, as JSON to the file in the first argument.

Twice: as it finds it (``at_start``), and once torch is imported (``with_torch``), as every script does first.
"""

import asyncio
import atexit
import contextvars
import decimal
import faulthandler
import gc
import io
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from multiprocessing import spawn

MAIN = dict(globals())


def read(path):
    with open(path) as file:
        return file.read()


def name_of(value):
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"


def interpreter():
    return {
        "flags": {
            name: getattr(sys.flags, name)
            for name in dir(sys.flags)
            if not name.startswith(("_", "n_")) and name not in ("count", "index")
        },
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "path": sys.path,
        "meta_path": [
            name_of(finder) if isinstance(finder, type) else type(finder).__qualname__ for finder in sys.meta_path
        ],
        "path_hooks": [name_of(hook) for hook in sys.path_hooks],
        "hooks": [
            name_of(hook)
            for hook in (
                sys.excepthook,
                sys.displayhook,
                sys.unraisablehook,
                sys.breakpointhook,
                threading.excepthook,
            )
        ],
        "tracing": [
            repr(sys.gettrace()),
            repr(sys.getprofile()),
            repr(sys.get_asyncgen_hooks()),
            sys.get_coroutine_origin_tracking_depth(),
        ],
        "limits": [
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
            sys.getdlopenflags(),
            getattr(sys, "get_int_max_str_digits", int)(),
        ],
        "bytecode": [sys.dont_write_bytecode, sys.pycache_prefix],
        "audit": hasattr(sys, "last_value") or hasattr(sys, "ps1") or hasattr(sys, "tracebacklimit"),
        "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "gc": [
            gc.isenabled(),
            gc.get_threshold(),
            gc.get_debug(),
            gc.get_freeze_count(),
            len(gc.callbacks),
            len(gc.garbage),
        ],
        "faulthandler": faulthandler.is_enabled(),
        "hash_of_text": hash("text"),
    }


def main_module():
    shown = {name: MAIN[name] for name in MAIN if name.startswith("__")}
    return {
        "names": sorted(shown),
        "values": {
            name: str(shown.get(name))
            for name in ("__name__", "__file__", "__spec__", "__package__", "__doc__", "__cached__")
        },
        "builtins": type(shown["__builtins__"]).__name__,
        "loader": type(shown.get("__loader__")).__name__,
        "is_in_modules": sys.modules["__main__"].__dict__ is globals(),
    }


def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        buffer = stream.buffer
        found[name] = {
            "is_original": stream is getattr(sys, f"__{name}__"),
            "encoding": stream.encoding,
            "errors": stream.errors,
            "newlines": repr(stream.newlines),
            "name": stream.name,
            "mode": getattr(stream, "mode", None),
            "line_buffering": stream.line_buffering,
            "write_through": stream.write_through,
            "buffer": type(buffer).__name__,
            "fileno": stream.fileno(),
            "closefd": getattr(buffer, "raw", buffer).closefd,
        }
    return found


def shown_logging():
    manager = logging.Logger.manager
    loggers = {}
    for name, logger in {"root": logging.root, **manager.loggerDict}.items():
        if isinstance(logger, logging.Logger) and (
            logger.handlers or logger.level or logger.filters or logger.disabled or not logger.propagate
        ):
            handlers = [type(handler).__name__ for handler in logger.handlers]
            loggers[name] = [logger.level, handlers, logger.filters, logger.disabled, logger.propagate]
    return {
        "loggers": loggers,
        "num_handlers": len(logging._handlerList),
        "manager": [manager.disable, str(manager.loggerClass), str(manager.logRecordFactory)],
        "last_resort": repr(logging.lastResort),
        "classes": [name_of(logging.getLoggerClass()), name_of(logging.getLogRecordFactory())],
        "settings": [
            logging.raiseExceptions,
            logging.logThreads,
            logging.logProcesses,
            str(logging._warnings_showwarning),
        ],
        "level_names": logging.getLevelName(25),
    }


def shown_warnings():
    return {
        "filters": [
            [
                kind,
                getattr(text, "pattern", text),
                category.__qualname__,
                getattr(module, "pattern", module),
                line,
            ]
            for kind, text, category, module, line in warnings.filters
        ],
        "once": {str(key): value for key, value in getattr(warnings, "onceregistry", {}).items()},
        "show": [name_of(warnings.showwarning), name_of(warnings.formatwarning)],
    }


def process():
    with open("/proc/self/stat") as file:
        words = file.read().rpartition(")")[2].split()
    with open("/proc/self/status") as file:
        masks = {
            line.split()[0]: line.split()[1]
            for line in file
            if line.startswith(("Sig", "ShdPnd", "NoNewPrivs", "Seccomp", "Cap"))
        }
    masks.pop("SigQ:", None)
    fds = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
        except OSError:
            continue  # that of the listing
        fds[fd] = [kind, os.get_inheritable(int(fd))]
    handlers = {}
    for signum in sorted(signal.valid_signals()):
        handler = signal.getsignal(signum)
        handlers[str(int(signum))] = name_of(handler) if callable(handler) else repr(handler)
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    umask = os.umask(0)
    os.umask(umask)
    return {
        "is_group_leader": os.getpgrp() == os.getpid(),
        "is_session_leader": os.getsid(0) == os.getpid(),
        "has_terminal": words[4] != "0",
        "nice": os.nice(0),
        "scheduling": os.sched_getscheduler(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "umask": umask,
        "cwd": os.getcwd(),
        "limits": limits,
        "handlers": handlers,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "kernel": masks,
        "wakeup_fd": signal.set_wakeup_fd(-1),
        "timers": [
            signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
        "fds": fds,
        "environ": dict(os.environ),
        "names": read("/proc/self/comm"),
        "oom_score_adj": read("/proc/self/oom_score_adj"),
        "timer_slack": read("/proc/self/timerslack_ns"),
    }


def library():
    me = multiprocessing.current_process()
    return {
        "locale": [locale.setlocale(category) for category in range(7)],
        "preferred_encoding": locale.getpreferredencoding(False),
        "threads": [
            threading.active_count(),
            threading.main_thread().name,
            threading.current_thread() is threading.main_thread(),
            threading.main_thread().ident == threading.get_ident(),
            threading.main_thread().native_id == os.getpid(),
            threading.stack_size(),
        ],
        "os_threads": len(os.listdir("/proc/self/task")),
        "asyncio": type(asyncio.get_event_loop_policy()).__name__,
        "context": len(contextvars.copy_context()),
        "decimal": repr(decimal.getcontext()),
        "multiprocessing": [
            me.name,
            type(me).__name__,
            me._identity,
            sorted(me._config),
            len(multiprocessing.active_children()),
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.process.ORIGINAL_DIR,
            multiprocessing.parent_process() is None,
        ],
        "multiprocessing_main": {
            name: str(value) for name, value in spawn.get_preparation_data("x").items() if name != "authkey"
        },
        "temporary": str(tempfile.tempdir),
        "random_is_seeded": random.getstate()[2] is None,
        "open": [name_of(io.open), name_of(open), io.DEFAULT_BUFFER_SIZE],
    }


def with_torch():
    import numpy
    import torch
    import torch.distributed

    return {
        "atexit": atexit._ncallbacks(),
        "logging": shown_logging(),
        "warnings": shown_warnings(),
        "interpreter": interpreter(),
        "torch": {
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "modes": [
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_anomaly_enabled(),
                torch.are_deterministic_algorithms_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_deterministic_debug_mode(),
            ],
            "default": [
                str(torch.get_default_dtype()),
                str(torch.get_default_device()),
                torch.get_float32_matmul_precision(),
            ],
            "backends": [
                torch.backends.mkldnn.enabled,
                torch.backends.mkldnn.is_available(),
                torch.backends.quantized.engine,
                torch.backends.cpu.get_cpu_capability(),
                torch.backends.opt_einsum.enabled,
            ],
            "sharing": torch.multiprocessing.get_sharing_strategy(),
            "print": vars(torch._tensor_str.PRINT_OPTS),
            "distributed": [torch.distributed.is_initialized(), str(torch.distributed.get_debug_level())],
            "bad_fork": [torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized()],
            "overrides": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
            "flush": torch.tensor([1e-310], dtype=torch.float64).mul(1).item() != 0,
        },
        "numpy": {
            "errors": numpy.geterr(),
            "print": {name: repr(value) for name, value in numpy.get_printoptions().items()},
            "buffer": numpy.getbufsize(),
            "generator": numpy.random.get_state()[0],
        },
    }


def random_numbers():
    import numpy
    import torch

    return {
        "python": random.random(),
        "numpy": float(numpy.random.rand()),
        "torch": torch.rand(()).item(),
        "torch_seed": torch.initial_seed(),
        "authkey": multiprocessing.current_process().authkey.hex(),
    }


if __name__ == "__main__":
    facts = {
        "interpreter": interpreter(),
        "main": main_module(),
        "streams": streams(),
        "logging": shown_logging(),
        "warnings": shown_warnings(),
        "process": process(),
        "library": library(),
        "atexit": atexit._ncallbacks(),
        "modules": sorted(sys.modules),
    }
    facts["with_torch"] = with_torch()
    facts["random"] = random_numbers()
    rank = os.environ.get("RANK", "0")
    with open(f"{sys.argv[1]}.{rank}", "w") as file:
        json.dump(facts, file, indent=1, default=repr)
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("script").info("line of rank %s", rank)
    logging.warning("warning of rank %s", rank)
