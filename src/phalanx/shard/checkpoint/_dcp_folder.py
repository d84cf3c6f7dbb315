"""Reads a folder that ``torch.distributed.checkpoint`` wrote, each rank the chunks that it needs.

The folder has a pickle, ``.metadata``, with the sizes of all tensors and where their chunks lie, and data files in
which each chunk is a small file of ``torch.save``. The pickle is only looked at (``_inert_pickle``), chunks are loaded
by torch as weights only: nothing of either is run. What lies beside tensors (numbers, lists of parameter groups) is
named but not read.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.shard.files._index import CheckpointError
from phalanx.shard.files._inert_pickle import Called, Named, read_inert
from phalanx.shard.layout._boxes import Box, intersect, view_of
from phalanx.storage import Place, RemotePath, as_place
from phalanx.storage._place import read_range, size_of

METADATA = ".metadata"


class _ChunkPlace(NamedTuple):
    file: str
    offset: int
    length: int


class _Stored(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: dict[Box, _ChunkPlace]


class DcpFolder:
    """The tensors of a distributed checkpoint of torch's, opened for reading."""

    def __init__(self, path: str | Path | RemotePath) -> None:
        self.path = as_place(path)
        self.bytes_read = 0
        what = self.path / METADATA
        try:
            self._tensors, self.others = _described(read_inert(what.read_bytes()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{what} cannot be read as the metadata of a distributed checkpoint: {error}"
            ) from error

    @staticmethod
    def is_at(path: Place) -> bool:
        return (path / METADATA).is_file()

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def size(self, name: str) -> torch.Size:
        return torch.Size(self._stored(name).size)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored(name).dtype

    def fill(self, name: str, out: Tensor, box: Box) -> None:
        """Read a box of a tensor into ``out``, in the dtype of ``out``."""
        filled = 0
        for chunk, place in self._stored(name).chunks.items():
            common = intersect(chunk, box)
            if common is not None:
                found = self._load(name, chunk, place)
                view_of(out, common, box.offsets).copy_(view_of(found, common, chunk.offsets))
                filled += common.volume
        if filled != box.volume:
            raise CheckpointError(
                f"{self.path / METADATA}: the chunks of {name!r} give {filled} of the {box.volume} elements that are "
                f"wanted; expected each exactly once"
            )

    def _stored(self, name: str) -> _Stored:
        stored = self._tensors.get(name)
        if stored is None:
            known = ", ".join(self.names()[:10])
            raise KeyError(f"no tensor {name!r} in {self.path}; there are {len(self._tensors)}: {known}")
        return stored

    def _load(self, name: str, chunk: Box, place: _ChunkPlace) -> Tensor:
        file = self.path / place.file
        try:
            if place.offset + place.length > size_of(file):
                raise ValueError("it ends before the chunk does")
            data = read_range(file, place.offset, place.length)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch says of bytes that it did not write
            raise CheckpointError(f"{file} cannot be read: {error}; {name!r} needs it") from error
        if not isinstance(found, Tensor) or tuple(found.shape) != chunk.sizes:
            raise CheckpointError(
                f"{file}: the chunk of {name!r} at {chunk.offsets} is {getattr(found, 'shape', type(found))}; expected "
                f"a tensor of size {chunk.sizes}"
            )
        self.bytes_read += place.length
        return found


def _described(metadata: Any) -> tuple[dict[str, _Stored], list[str]]:
    """Return the tensors of the metadata, and the names of what is no tensor."""
    fields = _object(metadata, "Metadata")
    tensors: dict[str, _Stored] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    others = []
    for name, entry in fields["state_dict_metadata"].items():
        if not _is(entry, "TensorStorageMetadata"):
            others.append(name)
            continue
        stored = _object(entry, "TensorStorageMetadata")
        tensors[name] = _Stored(_dtype(stored["properties"]), _numbers(stored["size"]), {})
        for chunk in stored["chunks"]:
            described = _object(chunk, "ChunkStorageMetadata")
            sizes[name, _numbers(described["offsets"])] = _numbers(described["sizes"])
    for index, info in fields["storage_data"].items():
        where = _object(index, "MetadataIndex")
        if where["fqn"] in tensors:
            offsets = _numbers(where["offset"])
            box = Box(offsets, sizes[where["fqn"], offsets])
            tensors[where["fqn"]].chunks[box] = _place(info)
    return tensors, sorted(others)


def _place(info: Any) -> _ChunkPlace:
    fields = _object(info, "_StorageInfo")
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"it names {file!r}, which is not a file beside it")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{file} is stored with {fields['transform_descriptors']}; expected plain chunks")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"a chunk at {offset!r} of length {length!r} in {file}")
    return _ChunkPlace(file, offset, length)


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Called) and value.name.startswith("torch.") and value.name.rpartition(".")[2] == kind


def _object(value: Any, kind: str) -> dict[str, Any]:
    if not _is(value, kind) or not isinstance(value.state, dict):
        raise ValueError(f"{getattr(value, 'name', type(value).__name__)} in the place of a {kind}")
    state: dict[str, Any] = value.state
    return state


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``."""
    found = value.args[0] if isinstance(value, Called) and value.name == "torch.Size" else value
    if not isinstance(found, tuple) or not all(type(each) is int and each >= 0 for each in found):
        raise ValueError(f"{found!r} in the place of a size")
    return found


def _dtype(properties: Any) -> torch.dtype:
    if not _is(properties, "TensorProperties") or not isinstance(properties.state, tuple):
        raise ValueError("a tensor without properties")
    named = properties.state[0]
    found = getattr(torch, named.name.removeprefix("torch."), None) if isinstance(named, Named) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{named!r} in the place of a dtype")
    return found
