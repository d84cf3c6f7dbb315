"""Opens a safetensors file wherever it lies, through the part of ``safetensors.safe_open``'s interface that we use.

Files of this machine are opened by that package. Of an object in a bucket the header is read, and of its tensors the
bytes that are asked for: rows from the first to the last that are wanted, several ranges at a time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx._fields import Fields, load_json
from phalanx.storage._place import Place
from phalanx.storage._remote_path import RemotePath
from phalanx.storage._tensor_dtypes import DTYPES

_LONGEST_HEADER = 100 << 20
_FIRST = 64 << 10
"""Bytes that are read at once at the start: the length of the header, and most headers."""


def open_tensors(place: Place) -> Any:
    """Return the tensors of a file, to be read by name and slice; use it as a context.

    Raises:
        OSError, ValueError, SafetensorError: it is not there, or no such file.
    """
    if isinstance(place, Path):
        from safetensors import safe_open  # start-up: loaded when used

        return safe_open(place, framework="pt")
    return RemoteTensors(place)


class _Placed(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int


class RemoteTensors:
    """The tensors of one object; its header has been read."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        size = path.size()
        head = path.read_range(0, min(_FIRST, size))
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{path} is no safetensors file: it has {size} bytes, and a header of {length}")
        if 8 + length > len(head):
            head += path.read_range(len(head), 8 + length - len(head))
        self._placed = _parse_header(bytes(head[8 : 8 + length]), 8 + length, size, str(path))

    def __enter__(self) -> RemoteTensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return sorted(self._placed)

    def get_slice(self, name: str) -> RemoteSlice:
        if name not in self._placed:
            raise ValueError(f"{self._path} has no tensor {name!r}")
        return RemoteSlice(self._path, self._placed[name])

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name).read(0, None)


class RemoteSlice:
    """One tensor of an object, to be read by slices."""

    def __init__(self, path: RemotePath, placed: _Placed) -> None:
        self._path, self._placed = path, placed

    def get_shape(self) -> list[int]:
        return list(self._placed.shape)

    def get_dtype(self) -> str:
        return self._placed.dtype

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Tensor:
        first, *others = where if isinstance(where, tuple) else (where,)
        begin, end, _ = first.indices(self._placed.shape[0])
        inner = (slice(None), *others)
        return self.read(begin, max(begin, end))[inner]

    def read(self, begin: int, end: int | None) -> Tensor:
        """Return rows ``begin`` to before ``end``; all of the tensor without ``end``."""
        dtype, shape = DTYPES[self._placed.dtype], self._placed.shape
        if end is not None:
            shape = (end - begin, *shape[1:])
        out = torch.empty(shape, dtype=dtype)
        if out.numel():
            row = math.prod(shape[1:]) * dtype.itemsize
            data = out.view(-1).view(torch.uint8).numpy().data
            self._path.read_into(self._placed.begin + begin * row, data)
        return out


def _parse_header(data: bytes, start: int, size: int, what: str) -> dict[str, _Placed]:
    """Return what a header says, of which every tensor lies inside the file; ``ValueError`` for anything else."""
    found = {}
    for name, entry in Fields({"header": load_json(data, what)}, what).mapping("header").items():
        if name == "__metadata__":
            continue
        fields = Fields(entry, f"{what}: tensor {name!r}")
        dtype, shape = fields.text("dtype"), tuple(fields.integers("shape", low=0))
        offsets = fields.integers("data_offsets", low=0)
        if dtype not in DTYPES or len(offsets) != 2:
            raise ValueError(f"{what}: tensor {name!r} has dtype {dtype!r} and offsets {offsets}")
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != num_bytes or start + offsets[1] > size:
            raise ValueError(
                f"{what}: tensor {name!r} of shape {list(shape)} does not lie at {offsets} of {size} bytes"
            )
        found[name] = _Placed(dtype, shape, start + offsets[0])
    return found
