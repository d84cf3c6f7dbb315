"""Maps one segment and the memory of shared tensors: private, nameless, gone with the last process that maps it.

A segment is a memfd (mode 0600, sealed against shrinking, never linked anywhere, not counted against ``/dev/shm``).
Peers open it through ``/proc/<pid>/fd/<n>``, which the kernel allows to the same user only, and check a random nonce or
the inode number. Its creator closes the descriptor when all have mapped it: then nobody can open it any more. After
SIGKILL of all ranks the kernel frees it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref

from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm._segment_layout import SegmentLayout
from phalanx.comm.transports.shm._syscalls import map_file, unmap


class Mapping:
    """Mapped memory with its address. ``memory`` is unmapped when the last tensor or view on it is gone.

    Not ``mmap.mmap``: that keeps a copy of the descriptor, through which the file could be opened for ever.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.address = map_file(fd, nbytes)
        self.memory = (ctypes.c_char * nbytes).from_address(self.address)
        weakref.finalize(self.memory, unmap, self.address, nbytes).atexit = False


def new_file(nbytes: int) -> int:
    """Return a private anonymous file of zeros; pages are taken when first touched."""
    fd = os.memfd_create("phalanx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file_of(pid: int, fd: int) -> int:
    """Return a descriptor for what process ``pid`` holds as ``fd``; ``OSError`` when it may not or is gone."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class Segment:
    """The mapped control words, bells and slots of one group."""

    def __init__(self, fd: int, layout: SegmentLayout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.mapping = Mapping(fd, layout.total_bytes)
        control = memoryview(self.mapping.memory).cast("B")[: layout.control_words * 8]
        self.words = control.cast("q")
        self.bells = control.cast("i")
        self.address = self.mapping.address

    def write_header(self, nonce: int) -> None:
        words = self.words
        words[L.H_MAGIC], words[L.H_VERSION], words[L.H_SIZE] = L.MAGIC, L.VERSION, self.layout.size
        words[L.H_NONCE] = nonce

    def header_fits(self, nonce: int) -> bool:
        words = self.words
        found = (words[L.H_MAGIC], words[L.H_VERSION], words[L.H_SIZE], words[L.H_NONCE])
        return found == (L.MAGIC, L.VERSION, self.layout.size, nonce)

    # -- while the group forms: each says that it has mapped the segment, then rank 0 that all have --------------------

    def say_mapped(self) -> None:
        self.words[self.layout.block(self.rank) + L.MAPPED] = 1

    def unmapped(self) -> list[int]:
        """Return the ranks that have not said so yet."""
        layout, words = self.layout, self.words
        return [rank for rank in range(layout.size) if not words[layout.block(rank) + L.MAPPED]]

    def say_formed(self) -> None:
        self.words[L.H_FORMED] = 1

    def is_formed(self) -> bool:
        return bool(self.words[L.H_FORMED])
