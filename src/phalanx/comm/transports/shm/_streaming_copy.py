"""Copies large results past the caches: stores that fetch no line before they overwrite it.

A plain copy reads each line of its target only to overwrite it, so that 3 bytes move for 2 that must, and it pushes out
of the caches what others still need there. glibc has such stores for copies above a threshold that it derives from the
size of the caches; on virtual machines it often takes that to be several times too large (192 MB where this was
measured), and a caller cannot set it. Python has no other way to them than the instructions themselves: 14 of them,
of the x86-64 baseline (SSE2), in a page that is written first and then made executable, never both at once.

Where that is not possible (another processor, a kernel that refuses executable memory) the plain copy is used; results
are the same. A reader of the result finds it in memory instead of in a cache, which is why small ones stay with the
plain copy.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from functools import cache

from phalanx.comm.transports.shm._syscalls import copy_bytes, protect

Copy = Callable[[int, int, int], None]
"""``copy(to_address, from_address, nbytes)``."""

STREAMED_BYTES = 16 * 1024 * 1024
"""From results of this size on, writing past the caches pays even if the result is read at once (ADR 8)."""

_LINE = 64

_COPY_LINES = bytes.fromhex(
    # rdi: target, a multiple of 16; rsi: source; rdx: bytes, a multiple of 64 and not 0
    "f30f6f06"  # next: movdqu xmm0, [rsi]
    "f30f6f4e10"  # movdqu xmm1, [rsi + 16]
    "f30f6f5620"  # movdqu xmm2, [rsi + 32]
    "f30f6f5e30"  # movdqu xmm3, [rsi + 48]
    "660fe707"  # movntdq [rdi], xmm0
    "660fe74f10"  # movntdq [rdi + 16], xmm1
    "660fe75720"  # movntdq [rdi + 32], xmm2
    "660fe75f30"  # movntdq [rdi + 48], xmm3
    "4883c640"  # add rsi, 64
    "4883c740"  # add rdi, 64
    "4883ea40"  # sub rdx, 64
    "75cc"  # jnz next
    "0faef8"  # sfence: what follows, a flag above all, is seen after the data
    "c3"  # ret
)


def copy_for(nbytes: int) -> Copy:
    """Return the copy to use for pieces of a result of ``nbytes`` altogether."""
    return _streaming() if nbytes >= STREAMED_BYTES else copy_bytes


@cache
def _streaming() -> Copy:
    """Return the copy past the caches, made on first use, or the plain one where there is none."""
    if platform.machine() != "x86_64":
        return copy_bytes
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        page.write(_COPY_LINES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
    except OSError:
        return copy_bytes
    copy_lines = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address)

    def copy(to: int, start: int, nbytes: int, _page: mmap.mmap = page) -> None:
        head = -to % _LINE
        lines = (nbytes - head) // _LINE * _LINE
        if lines <= 0 or abs(to - start) < nbytes:  # an overlap needs memmove
            copy_bytes(to, start, nbytes)
            return
        copy_bytes(to, start, head)
        copy_lines(to + head, start + head, lines)
        done = head + lines
        copy_bytes(to + done, start + done, nbytes - done)

    return copy
