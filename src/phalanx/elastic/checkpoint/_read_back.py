"""Reads a file of tensors back from the disk and compares it with the memory that it was written from.

What the kernel still holds of the file is let go first, where it lets go: what is compared is what a later read finds.
One thread, in pieces that torch does not spread over others: training goes on meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.storage._open_tensors import open_tensors

PIECE = 1 << 14
"""Elements that are compared at once."""
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def forget_pages(path: Path) -> None:
    """Have the disk hold a file's bytes, and the kernel forget them: the next read is of the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def check_written(path: Path, values: Mapping[str, Tensor]) -> None:
    """Raise ``OSError`` unless the file holds these tensors, bit for bit."""
    from safetensors import SafetensorError  # start-up: loaded when used

    try:
        with open_tensors(path) as file:
            problem = next((name for name, value in values.items() if not _is_same(file.get_tensor(name), value)), None)
    except (LookupError, ValueError, RuntimeError, SafetensorError) as error:
        problem = repr(error)
    if problem is not None:
        raise OSError(
            errno.EIO,
            f"{path.name} was read back and is not what was written ({problem}): the disk, or the memory, of this "
            "machine is faulty",
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = _bits(one), _bits(other)
    return all(torch.equal(a[i : i + PIECE], b[i : i + PIECE]) for i in range(0, len(a), PIECE))


def _bits(tensor: Tensor) -> Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return flat.view(_BY_SIZE[flat.element_size()])
