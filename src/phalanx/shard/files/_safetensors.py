"""Writes and reads safetensors files in place: the header, a mapping to write through, and reads of byte ranges.

Owns the format: eight bytes of header length, a JSON header, then the tensors' bytes. Nothing here is ever executed or
unpickled. Reading checks that every range lies inside the file.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.storage._tensor_dtypes import DTYPES as DTYPES
from phalanx.storage._tensor_dtypes import NAMES as NAMES

METADATA = "__metadata__"
"""The entry of a header that is no tensor; tools of Hugging Face ask it which framework the tensors are of."""
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of Linux


class TensorEntry(NamedTuple):
    """One tensor in a file: ``begin`` is counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def layout(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
) -> tuple[bytes, dict[str, TensorEntry], int]:
    """Return the head of a file with these tensors, where each will be, and the size of the file. Wide elements come
    first."""
    if METADATA in tensors:
        raise ValueError(f"a tensor is called {METADATA}, which safetensors files keep for themselves; rename it")
    described: dict[str, Any] = {METADATA: {"format": "pt"}}
    ends: dict[str, tuple[int, int]] = {}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        if dtype not in NAMES:
            raise ValueError(f"{name}: {dtype} cannot be stored in a safetensors file; cast it first")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        ends[name] = (position, position + nbytes)
        described[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": list(ends[name])}
        position += nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begins aligned
    head = len(text).to_bytes(8, "little") + text
    entries = {
        name: TensorEntry(dtype, tuple(shape), len(head) + ends[name][0]) for name, (dtype, shape) in tensors.items()
    }
    return head, entries, len(head) + position


@contextmanager
def mapped_file(path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of these dtypes and sizes in a new file, by name; the file appears when the block is left.

    Its room is taken at the start: a disk that fills up under a mapping would kill the process.
    """
    head, entries, size = layout(tensors)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w+b") as file:
            file.write(head)
            file.flush()
            _take_room(file.fileno(), size)
            memory = mmap.mmap(file.fileno(), size)  # goes with the last tensor that uses it
            yield {name: _mapped(memory, entry) for name, entry in entries.items()}
            memory.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _mapped(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, offset=entry.begin, count=entry.nbytes)
    return raw.view(entry.dtype).view(entry.shape)


def _take_room(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # platform: macOS has no such call
        os.ftruncate(fd, size)


def start_writing(fd: int, begin: int, nbytes: int) -> None:
    """Have the disk begin with these bytes while the caller goes on; only ``fsync`` promises anything."""
    start = _sync_file_range()
    if start is not None:
        start(fd, begin, nbytes, _START_WRITING)  # a refusal costs time later and nothing else


@lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call, which Python has no name for; None elsewhere."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function: Callable[[int, int, int, int], int] = call
    return function


def put_in_place(partial: Path, folder: Path, *, sync: bool) -> None:
    """Rename a complete folder to its name. What was there before is whole, as ``<name>.old``, until the new one is."""
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(partial, folder)
    if sync:
        sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
