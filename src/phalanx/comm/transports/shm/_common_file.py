"""One file of anonymous memory that all ranks of a host have open, and windows of fixed address onto such files.

Owns ``open_common_file`` (a collective) and ``FixedWindow``. A window shows a file *privately*: pages are the file's
own until this process writes to one; then it has a copy, which nobody else sees and which is gone when the window is
turned to something else. What other ranks write to pages that were not copied shows at once (Linux' page cache).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.comm.transports.shm._segment import Mapping, new_file, open_file_of
from phalanx.errors import CommError

PAGE = mmap.PAGESIZE
_LEAST_PIECE, _MOST_PIECES = 1 << 21, 32
_FIXED, _ANONYMOUS, _NOTHING = 0x10, 0x20, 0  # MAP_FIXED, MAP_ANONYMOUS, PROT_NONE: alike on x86-64 and arm64
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p
_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class CommonFile:
    """A file that every rank of a group has mapped for writing."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        mapping = Mapping(fd, nbytes)
        self.bytes = torch.frombuffer(mapping.memory, dtype=torch.uint8)
        weakref.finalize(self, os.close, fd)


class Ranks(Protocol):
    """What this needs of a group."""

    @property
    def rank(self) -> int: ...

    def broadcast_value(self, value: Any) -> Any: ...

    def all_gather_values(self, value: Any) -> list[Any]: ...


def open_common_file(group: Ranks, nbytes: int) -> CommonFile:
    """Make one file for all ranks of ``group``, which are on one host; they all call this."""
    size = -(-nbytes // PAGE) * PAGE
    fd = new_file(size) if group.rank == 0 else -1
    told = [os.getpid(), fd, os.fstat(fd).st_ino] if group.rank == 0 else None
    pid, number, inode = group.broadcast_value(told)
    error = ""
    if group.rank:
        try:
            fd = open_file_of(pid, number)
            if os.fstat(fd).st_ino != inode:
                raise OSError(f"descriptor {number} is something else by now")
        except OSError as found:
            error = str(found)
    failed = [(rank, text) for rank, text in enumerate(group.all_gather_values(error)) if text]
    if failed:  # on every rank alike, so that none waits for another
        raise CommError(f"rank {group.rank}: rank {failed[0][0]} cannot open rank 0's shared memory: {failed[0][1]}")
    return CommonFile(fd, size)


class FixedWindow:
    """Addresses that stay, and show a file or nothing: then every byte reads as 0xff, which is NaN in every dtype."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = -(-max(nbytes, 1) // PAGE) * PAGE
        self._address = _checked(_mmap(None, self._nbytes, _NOTHING, mmap.MAP_PRIVATE | _ANONYMOUS, -1, 0))
        self._memory = (ctypes.c_char * nbytes).from_address(self._address)
        weakref.finalize(self._memory, _munmap, self._address, self._nbytes).atexit = False
        self.hide()

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the window as a tensor; the addresses live as long as a tensor on them."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count)

    def show(self, file: CommonFile | None = None, offset: int = 0) -> None:
        """Show ``file`` from a byte on that begins a page, or, without one, fresh memory of this process."""
        allowed, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED
        fd = -1 if file is None else file.fd
        _checked(_mmap(self._address, self._nbytes, allowed, flags | (_ANONYMOUS if file is None else 0), fd, offset))

    def show_zeros(self) -> None:
        """Show memory of this process alone, all zeros."""
        flags = mmap.MAP_PRIVATE | _FIXED | _ANONYMOUS
        _checked(_mmap(self._address, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))

    def hide(self) -> None:
        """Show nothing. Whoever kept a view and reads it gets NaN; what is written is lost."""
        piece = max(_LEAST_PIECE, -(-self._nbytes // _MOST_PIECES // PAGE) * PAGE)
        blank, allowed = _blank.at_least(piece), mmap.PROT_READ | mmap.PROT_WRITE
        for start in range(0, self._nbytes, piece):
            length = min(piece, self._nbytes - start)
            _checked(_mmap(self._address + start, length, allowed, mmap.MAP_PRIVATE | _FIXED, blank.fd, 0))


class BlankFile:
    """A file of 0xff."""

    def __init__(self, nbytes: int) -> None:
        self.fd, self.nbytes = new_file(nbytes), nbytes
        weakref.finalize(self, os.close, self.fd).atexit = False  # mappings of it stay
        os.pwrite(self.fd, b"\xff" * nbytes, 0)


class BlankFiles:
    """The longest file of 0xff that was ever asked for; windows show it over and over.

    Threads that hide windows at the same time may each make one. Whoever holds one keeps it open until it is mapped.
    """

    def __init__(self) -> None:
        self._longest: BlankFile | None = None

    def at_least(self, nbytes: int) -> BlankFile:
        found = self._longest
        if found is None or found.nbytes < nbytes:
            found = self._longest = BlankFile(nbytes)
        return found


_blank = BlankFiles()


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address)
