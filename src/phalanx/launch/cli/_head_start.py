"""Loads the native library of torch while Python imports something else: a head start for ``import torch``.

Owns one thread, which is gone before anybody may fork. Loading that library is a sixth of ``import torch``, most of it
spent in the library's own constructors, which need no interpreter. Nothing depends on it: where the library is not
found or does not load, ``import torch`` does, and says, what it would have anyway. Builds for accelerators are left
alone: torch loads the vendors' libraries first, in an order of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module

_ACCELERATORS = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")

_EXTENSIONS = (
    "_bisect", "_blake2", "_bz2", "_csv", "_datetime", "_hashlib", "_heapq", "_json", "_lzma", "_opcode", "_pickle",
    "_posixsubprocess", "_queue", "_random", "_sha512", "_socket", "_ssl", "_struct", "_typing", "_uuid", "array",
    "binascii", "fcntl", "math", "select", "zlib",
)  # fmt: skip
"""What the agent and the first lines of torch import of Python's own extension modules. The dynamic linker loads one
thing at a time, so these come first: any that were forgotten here would have to wait for torch's library."""


def begin_to_load(path: str) -> Callable[[], None]:
    """Begin to load a library; returns a function that waits until it is loaded and the thread gone. "": do nothing."""
    if not path:
        return lambda: None
    for name in _EXTENSIONS:
        try:
            import_module(name)
        except ImportError:  # another Python may have it built in, or not at all
            pass
    thread = threading.Thread(target=_load, args=(path,), name="phalanx-load-torch", daemon=True)
    thread.start()
    return thread.join


def find_library() -> str:
    """Return the path of torch's library for the processor; "" when there is nothing to gain or it is better left
    alone."""
    if not sys.platform.startswith("linux") or "torch" in sys.modules:
        return ""
    spec = importlib.util.find_spec("torch")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        directory = os.path.join(package, "lib")
        path = os.path.join(directory, "libtorch_cpu.so")
        if os.path.exists(path):
            has_more = any(os.path.exists(os.path.join(directory, name)) for name in _ACCELERATORS)
            return "" if has_more else path
    return ""


def _load(path: str) -> None:
    # The C function, not ctypes.CDLL(path): only a call through ctypes lets go of the interpreter's lock.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)
