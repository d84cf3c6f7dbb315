"""Does the few things that Python cannot say by itself: futex, memory fence, raw copies, private anonymous files.

Owns the calls into libc of this transport. Linux only; importing it elsewhere is harmless, ``unavailable`` then says
why the transport cannot be used.

Memory ordering (what the flags of ``_segment_layout`` rest on):

- Flags are aligned 64-bit words in a mapping that all ranks share, read and written through a ``memoryview`` of format
  ``q``: CPython moves the 8 bytes with one fixed-size ``memcpy``, which is one plain load or store on x86-64 and arm64.
  They never tear, and no compiler moves them, since each is a call into the interpreter.
- x86-64 is TSO: stores become visible in program order and loads happen in program order, so "write data, write
  flag" / "read flag, read data" needs nothing more. (glibc ends its non-temporal copies with ``sfence``.)
- arm64 may reorder both. There ``fence`` is called between data and flag on both sides. It is the ``FUTEX_WAKE`` system
  call on a private word: the kernel runs a full barrier (``smp_mb``) before it looks for waiters, by contract, since
  user-space locks depend on it.
- The one store-then-load pattern (write flag, look whether a peer sleeps / mark asleep, look at the flag) is left
  without a fence on purpose: a wake-up can then be lost, and the sleeper's short timeout repairs it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}
_ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def unavailable() -> str | None:
    """Why this machine cannot run the transport, or None."""
    if not sys.platform.startswith("linux"):
        return f"shared memory transport needs Linux, this is {sys.platform}"
    if platform.machine() not in _FUTEX_NUMBER:
        return f"no futex call known for {platform.machine()}"
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return "flags need a 64-bit little-endian machine"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python lacks memfd_create or pidfd_open"
    return None


def _bind(library: ctypes.CDLL) -> Callable[..., int]:
    call = library.syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return call


_number = _FUTEX_NUMBER.get(platform.machine(), 0)
# PyDLL keeps the interpreter lock: right for calls that cannot block; CDLL gives it up while it sleeps or copies.
_quick_call = _bind(ctypes.PyDLL(None))
_blocking_call = _bind(ctypes.CDLL(None))

copy_bytes = ctypes.CDLL(None).memmove
"""``copy_bytes(to_address, from_address, nbytes)``; other threads run meanwhile."""
copy_bytes.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
copy_bytes.restype = None


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p
_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(fd: int, nbytes: int) -> int:
    """Map a file for reading and writing, shared; its address. ``OSError`` when that fails."""
    address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    _munmap(address, nbytes)


_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def protect(address: int, nbytes: int, allowed: int) -> None:
    """Set what may be done with whole pages (``mmap.PROT_...``). ``OSError`` when the kernel refuses."""
    if _mprotect(address, nbytes, allowed):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until the 32-bit word is woken, differs from ``expected``, or the time is over."""
    whole = int(seconds)
    pause = _Timespec(whole, int((seconds - whole) * 1e9))
    _blocking_call(_number, address, _FUTEX_WAIT, expected, ctypes.addressof(pause))


def futex_wake(address: int) -> None:
    """Wake everyone who sleeps on the word."""
    _quick_call(_number, address, _FUTEX_WAKE, _ALL, None)


_fence_word = ctypes.c_int64(0)
_fence_address = ctypes.addressof(_fence_word)


def _full_fence() -> None:
    _quick_call(_number, _fence_address, _FUTEX_WAKE, 1, None)


fence: Callable[[], None] | None = None if platform.machine() == "x86_64" else _full_fence
"""Full memory barrier where the machine needs one around flags, None where it does not (see above)."""
