"""Writes and reads the tensor files of a save: safetensors with the model's own names, tensors or ranges of them.

A file holds any ranges (in row-major order) of any tensors of a state; a tensor that lies in one of them from its first
to its last element has its name and shape there, else each range is ``name[begin:end]`` with one dim. ``FileRecord`` is
what a manifest says of a file. Whether files are those that were written is ``_saves``'s business.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx._fields import Fields
from phalanx.elastic.checkpoint._state_codec import dtype_from_name
from phalanx.storage import Place
from phalanx.storage._open_tensors import open_tensors

SUFFIX = ".safetensors"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FILE = re.compile(r"[\w-]+\.safetensors")


@dataclass(frozen=True)
class TensorRange:
    """Elements ``begin`` to before ``end`` of the tensor ``name`` of a state, which has ``shape``."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    values: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorRange:
        """Return all of a tensor."""
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), tensor)


@dataclass(frozen=True)
class StoredRange:
    """Elements of a tensor of a state as a manifest names them, without their values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    stored_as: str = ""
    """Another key than the name says: saves of the first format count their tensors."""

    @property
    def is_all(self) -> bool:
        return (self.begin, self.end) == (0, math.prod(self.shape))

    @property
    def key(self) -> str:
        return self.stored_as or (self.name if self.is_all else f"{self.name}[{self.begin}:{self.end}]")


@dataclass(frozen=True)
class FileRecord:
    """What a tensor file holds, and its checksum."""

    file: str
    checksum: str
    ranges: tuple[StoredRange, ...]

    def to_json(self) -> dict[str, Any]:
        ranges = [[r.name, str(r.dtype).removeprefix("torch."), list(r.shape), r.begin, r.end] for r in self.ranges]
        return {"file": self.file, "checksum": self.checksum, "ranges": ranges}

    @classmethod
    def from_json(cls, value: Any, what: str, error: type[Exception] = ValueError) -> FileRecord:
        """Return the inverse of ``to_json``; ``error`` for anything else."""
        fields = Fields(value, what, error)
        file = fields.text("file")
        if not _FILE.fullmatch(file):  # a manifest from a stranger could name any path
            raise error(f"{what} names the file {file!r}; expected a name that ends in {SUFFIX}")
        return cls(file, fields.text("checksum"), tuple(_stored(one, what, error) for one in fields.items("ranges")))


def _stored(value: Any, what: str, error: type[Exception]) -> StoredRange:
    if not isinstance(value, list) or len(value) != 5:
        raise error(f"{what}: {value!r} is no range of a tensor")
    names = ("name", "dtype", "shape", "begin", "end")
    fields = Fields(dict(zip(names, value, strict=True)), what, error)
    shape = tuple(fields.integers("shape", low=0))
    try:
        dtype = dtype_from_name(fields.text("dtype"))
    except ValueError as problem:
        raise error(f"{what}: {problem}") from problem
    found = StoredRange(fields.text("name"), dtype, shape, fields.integer("begin", low=0), fields.integer("end", low=0))
    if found.begin > found.end or found.end > math.prod(shape):
        raise error(f"{what}: elements {found.begin} to {found.end} of {found.name}, which has shape {list(shape)}")
    return found


def write_tensor_file(path: Path, ranges: Iterable[TensorRange]) -> FileRecord:
    """Write ranges into one file. ``OSError`` when the disk does not take it."""
    from safetensors import SafetensorError  # start-up: loaded when used
    from safetensors.torch import save_file

    stored, values = [], {}
    for one in ranges:
        found = StoredRange(one.name, one.values.dtype, tuple(one.shape), one.begin, one.end)
        flat = one.values.detach().contiguous()
        stored.append(found)
        values[found.key] = flat.view(one.shape) if found.is_all else flat.view(-1)
    assert len(values) == len(stored), "names are used once"
    try:
        save_file(values, path)
    except SafetensorError as error:  # also what the disk says, as text
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    return FileRecord(path.name, hash_file(path), tuple(stored))


def check_headers(path: Place, record: FileRecord) -> str:
    """Return what is wrong with what a file says it holds; empty if nothing."""
    from safetensors import SafetensorError  # start-up: loaded when used

    try:
        with open_tensors(path) as file:
            names: Any = file.keys()
            if sorted(names) != sorted(one.key for one in record.ranges):
                return f"{path.name} holds other tensors than the manifest says"
            for one in record.ranges:
                shape = list(one.shape) if one.is_all else [one.end - one.begin]
                found = _kind(file, one.key)
                if found != (one.dtype, shape):
                    return f"{path.name}: {one.key} is {found}; expected {(one.dtype, shape)}"
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        return f"{path.name} cannot be read: {error!r}"
    return ""


def check_tiles(records: Sequence[FileRecord], names: Sequence[str]) -> str:
    """Return which tensor is not there from its first to its last element, once; empty if all of ``names`` are."""
    known: dict[str, list[StoredRange]] = {}
    for record in records:
        for one in record.ranges:
            known.setdefault(one.name, []).append(one)
    for name in names:
        ranges = sorted(known.get(name, ()), key=lambda one: (one.begin, one.end))
        if not ranges:
            return f"no file holds {name}"
        place = 0
        for one in ranges:
            if (one.dtype, one.shape) != (ranges[0].dtype, ranges[0].shape):
                return f"files disagree about {name}: {ranges[0].dtype} {ranges[0].shape} and {one.dtype} {one.shape}"
            if one.begin != place:
                return f"elements {min(place, one.begin)} to {max(place, one.begin)} of {name} are there twice or never"
            place = one.end
        if place != math.prod(ranges[0].shape):
            return f"elements {place} to {math.prod(ranges[0].shape)} of {name} are in no file"
    return ""


def counted_record(path: Place, checksum: str, names: Sequence[str]) -> FileRecord:
    """Return the record of a file of the first format, whose tensors are counted in the order of ``names``."""
    with open_tensors(path) as file:
        found = []
        for number, name in enumerate(names):
            key = f"{number:06d}"
            dtype, shape = _kind(file, key)
            found.append(StoredRange(name, dtype, tuple(shape), 0, math.prod(shape), key))
    return FileRecord(path.name, checksum, tuple(found))


def _kind(file: Any, key: str) -> tuple[torch.dtype, list[int]]:
    """Return dtype and shape of a tensor in an open file, without reading it."""
    tensor = file.get_slice(key)
    shape: list[int] = tensor.get_shape()
    return (tensor[:0].dtype if shape else file.get_tensor(key).dtype), shape


class TensorFiles:
    """Reads ranges out of the files of one save; use it as a context, files stay open meanwhile.

    Errors are those of ``safetensors`` and the file system.
    """

    def __init__(self, folder: Place, records: Sequence[FileRecord]) -> None:
        self.folder = folder
        self._where: dict[str, list[tuple[StoredRange, str]]] = {}
        for record in records:
            for one in record.ranges:
                self._where.setdefault(one.name, []).append((one, record.file))
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def empty(self, name: str) -> Tensor:
        """Return a tensor of the right shape and dtype, without memory."""
        one = self._where[name][0][0]
        return torch.empty(one.shape, dtype=one.dtype, device="meta")

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return elements ``begin`` to before ``end`` with one dim; all of them, in their shape, without ``end``."""
        first, file = self._where[name][0]
        if first.is_all and end is None:
            return self._file(file).get_tensor(first.key)  # type: ignore[no-any-return]  # safetensors has no types
        stop = math.prod(first.shape) if end is None else end
        values = torch.empty(stop - begin, dtype=first.dtype)
        for one, file in self._where[name]:
            a, b = max(begin, one.begin), min(stop, one.end)
            if a < b:
                values[a - begin : b - begin] = self._elements(one, file, a - one.begin, b - one.begin)
        return values.view(first.shape) if end is None else values

    def _elements(self, one: StoredRange, file: str, begin: int, end: int) -> Tensor:
        source = self._file(file)
        if not one.is_all or len(one.shape) < 2:
            if not one.shape:
                return source.get_tensor(one.key).view(-1)  # type: ignore[no-any-return]
            return source.get_slice(one.key)[begin:end]  # type: ignore[no-any-return]
        inner = math.prod(one.shape[1:])
        first, last = begin // inner, -(-end // inner)
        rows: Tensor = source.get_slice(one.key)[first:last]
        return rows.reshape(-1)[begin - first * inner : end - first * inner]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(open_tensors(self.folder / name))
        return self._open[name]


def hash_file(path: Place) -> str:
    sum_ = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sum_.update(block)
    return sum_.hexdigest()
