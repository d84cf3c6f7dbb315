"""Writes and reads the tensor files of a save: safetensors with the model's own names, tensors or ranges of them.

A file holds any ranges (in row-major order) of any tensors of a state, or of equal parts of them along a dim
(``Chunk``: what a tensor parallel worker has would be many small ranges of the whole). A tensor that lies in one of
them from its first to its last element has its name and shape there, else each range is ``name[begin:end]`` with one
dim, and those of a part ``name[dim 1, part 0 of 2][begin:end]``; a whole part has its shape and no range in its name.
``FileRecord`` is what a manifest says of a file. Whether files are those that were written is ``_saves``'s business.
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
from phalanx.elastic.checkpoint._read_back import check_written, forget_pages
from phalanx.elastic.checkpoint._state_codec import dtype_from_name
from phalanx.storage import Place
from phalanx.storage._open_tensors import open_tensors

SUFFIX = ".safetensors"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FILE = re.compile(r"[\w-]+\.safetensors")


@dataclass(frozen=True)
class Chunk:
    """Part ``index`` of ``count`` equal ones of a tensor along ``dim``."""

    dim: int
    index: int
    count: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape.

        >>> Chunk(1, 0, 2).shape((3, 8))
        (3, 4)
        """
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(whole))

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor, as a view."""
        size = whole.shape[self.dim] // self.count
        return whole.narrow(self.dim, self.index * size, size)


@dataclass(frozen=True)
class TensorRange:
    """Elements ``begin`` to before ``end`` of the tensor ``name`` of a state, which has ``shape``, or of its part."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    values: Tensor
    chunk: Chunk | None = None

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
    chunk: Chunk | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what is cut into ranges: of the tensor, or of a part of it."""
        return self.shape if self.chunk is None else self.chunk.shape(self.shape)

    @property
    def is_all_of_part(self) -> bool:
        return (self.begin, self.end) == (0, math.prod(self.part_shape))

    @property
    def is_all(self) -> bool:
        return self.chunk is None and self.is_all_of_part

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.part_shape if self.is_all_of_part else (self.end - self.begin,)

    @property
    def key(self) -> str:
        one = self.chunk
        part = "" if one is None else f"[dim {one.dim}, part {one.index} of {one.count}]"
        elements = "" if self.is_all_of_part else f"[{self.begin}:{self.end}]"
        return self.stored_as or f"{self.name}{part}{elements}"


@dataclass(frozen=True)
class FileRecord:
    """What a tensor file holds, and its checksum."""

    file: str
    checksum: str
    ranges: tuple[StoredRange, ...]

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "checksum": self.checksum, "ranges": list(map(_to_json, self.ranges))}

    @classmethod
    def from_json(cls, value: Any, what: str, error: type[Exception] = ValueError) -> FileRecord:
        """Return the inverse of ``to_json``; ``error`` for anything else."""
        fields = Fields(value, what, error)
        file = fields.text("file")
        if not _FILE.fullmatch(file):  # a manifest from a stranger could name any path
            raise error(f"{what} names the file {file!r}; expected a name that ends in {SUFFIX}")
        return cls(file, fields.text("checksum"), tuple(_stored(one, what, error) for one in fields.items("ranges")))


def _to_json(one: StoredRange) -> list[Any]:
    chunk = [] if one.chunk is None else [one.chunk.dim, one.chunk.index, one.chunk.count]
    return [one.name, str(one.dtype).removeprefix("torch."), list(one.shape), one.begin, one.end, *chunk]


def _stored(value: Any, what: str, error: type[Exception]) -> StoredRange:
    names = ("name", "dtype", "shape", "begin", "end", "dim", "index", "count")
    if not isinstance(value, list) or len(value) not in (5, len(names)):
        raise error(f"{what}: {value!r} is no range of a tensor")
    fields = Fields(dict(zip(names, value, strict=False)), what, error)
    shape = tuple(fields.integers("shape", low=0))
    try:
        dtype = dtype_from_name(fields.text("dtype"))
    except ValueError as problem:
        raise error(f"{what}: {problem}") from problem
    begin, end, chunk = fields.integer("begin", low=0), fields.integer("end", low=0), None
    if len(value) == len(names):
        chunk = Chunk(fields.integer("dim", low=0), fields.integer("index", low=0), fields.integer("count", low=1))
        if chunk.dim >= len(shape) or shape[chunk.dim] % chunk.count or chunk.index >= chunk.count:
            raise error(f"{what}: {chunk} of {fields.text('name')}, which has shape {list(shape)}")
    found = StoredRange(fields.text("name"), dtype, shape, begin, end, chunk=chunk)
    if begin > end or end > math.prod(found.part_shape):
        raise error(f"{what}: elements {begin} to {end} of {found.name}, which has shape {list(found.part_shape)}")
    return found


def write_tensor_file(path: Path, ranges: Iterable[TensorRange], *, verify: bool = False) -> FileRecord:
    """Write ranges into one file. ``OSError`` when the disk does not take it, or ``verify`` finds other bytes there.

    ``TypeError`` names a tensor of a dtype that such files cannot hold.
    """
    from safetensors import SafetensorError  # start-up: loaded when used
    from safetensors.torch import save_file

    stored, values = [], {}
    for one in ranges:
        if one.values.dtype == torch.complex128:
            raise TypeError(
                f"{one.name} is a tensor of torch.complex128, which a safetensors file cannot hold; keep it as "
                "torch.view_as_real(tensor), or as complex64"
            )
        found = StoredRange(one.name, one.values.dtype, tuple(one.shape), one.begin, one.end, chunk=one.chunk)
        stored.append(found)
        values[found.key] = one.values.detach().contiguous().view(found.stored_shape)
    assert len(values) == len(stored), "names are used once"
    try:
        save_file(values, path)
    except SafetensorError as error:  # also what the disk says, as text
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    if verify:
        forget_pages(path)
    checksum = hash_file(path)
    if verify:
        check_written(path, values)
    return FileRecord(path.name, checksum, tuple(stored))


def check_headers(path: Place, record: FileRecord) -> str:
    """Return what is wrong with what a file says it holds; empty if nothing."""
    from safetensors import SafetensorError  # start-up: loaded when used

    try:
        with open_tensors(path) as file:
            names: Any = file.keys()
            if sorted(names) != sorted(one.key for one in record.ranges):
                return f"{path.name} holds other tensors than the manifest says"
            for one in record.ranges:
                found, expected = _kind(file, one.key), (one.dtype, list(one.stored_shape))
                if found != expected:
                    return f"{path.name}: {one.key} is {found}; expected {expected}"
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
        ranges = known.get(name, [])
        if not ranges:
            return f"no file holds {name}"
        kind = _kind_of(ranges[0])
        other = next((_kind_of(one) for one in ranges if _kind_of(one) != kind), None)
        if other is not None:
            return f"files disagree about {name}: {kind} and {other}"
        by_part: dict[int, list[StoredRange]] = {index: [] for index in range(kind[-1])}
        for one in ranges:
            by_part[0 if one.chunk is None else one.chunk.index].append(one)
        for index, part in by_part.items():
            what = f"part {index} of {kind[-1]} of {name}" if kind[-1] > 1 else name
            if problem := _check_part(part, math.prod(ranges[0].part_shape), what):
                return problem
    return ""


def _kind_of(one: StoredRange) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return dtype and shape of a tensor, along which dim it is cut, and into how many parts."""
    return (one.dtype, one.shape, *((-1, 1) if one.chunk is None else (one.chunk.dim, one.chunk.count)))


def _check_part(ranges: Sequence[StoredRange], count: int, what: str) -> str:
    """Return which of ``count`` elements are not there once; empty if all are."""
    place = 0
    for one in sorted(ranges, key=lambda one: (one.begin, one.end)):
        if one.begin != place:
            return f"elements {min(place, one.begin)} to {max(place, one.begin)} of {what} are there twice or never"
        place = one.end
    return "" if place == count else f"elements {place} to {count} of {what} are in no file"


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
        if first.chunk is not None:
            whole = self._joined(name, first)
            return whole if end is None else whole.view(-1)[begin:end]
        stop = math.prod(first.shape) if end is None else end
        values = self._between(name, None, begin, stop)
        return values.view(first.shape) if end is None else values

    def read_part(self, name: str, chunk: Chunk, begin: int, end: int) -> Tensor:
        """Return elements ``begin`` to before ``end`` of a part of a tensor, however it was cut when it was saved."""
        first, _ = self._where[name][0]
        if chunk in [one.chunk for one, _ in self._where[name]]:
            return self._between(name, chunk, begin, end)
        if first.chunk is None and not chunk.dim:
            before = chunk.index * math.prod(chunk.shape(first.shape))
            return self._between(name, None, before + begin, before + end)
        return chunk.of(self.read(name)).reshape(-1)[begin:end]

    def _joined(self, name: str, first: StoredRange) -> Tensor:
        """Return all of a tensor that is stored in parts."""
        whole = torch.empty(first.shape, dtype=first.dtype)
        for chunk in {one.chunk for one, _ in self._where[name]}:
            assert chunk is not None, "all are parts, or the save had not been readable"
            values = self._between(name, chunk, 0, math.prod(first.part_shape))
            chunk.of(whole).copy_(values.view(first.part_shape))
        return whole

    def _between(self, name: str, chunk: Chunk | None, begin: int, end: int) -> Tensor:
        """Return elements of a tensor, or of a part of it, that is stored so."""
        values = torch.empty(end - begin, dtype=self._where[name][0][0].dtype)
        for one, file in self._where[name]:
            a, b = max(begin, one.begin), min(end, one.end)
            if a < b and one.chunk == chunk:
                values[a - begin : b - begin] = self._elements(one, file, a - one.begin, b - one.begin)
        return values

    def _elements(self, one: StoredRange, file: str, begin: int, end: int) -> Tensor:
        source, shape = self._file(file), one.stored_shape
        if len(shape) < 2:
            if not shape:
                return source.get_tensor(one.key).view(-1)  # type: ignore[no-any-return]
            return source.get_slice(one.key)[begin:end]  # type: ignore[no-any-return]
        inner = math.prod(shape[1:])
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
