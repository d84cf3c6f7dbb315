"""Reads the tensors of files that ``torch.save`` wrote: one file, or a folder with ``pytorch_model.bin``.

torch loads them as weights only and maps them, so that a rank touches the pages of what it holds. Dicts inside of dicts
are read through: their keys are joined by dots.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx._fields import Fields, load_json
from phalanx.shard.files._index import CheckpointError
from phalanx.shard.layout._boxes import Box, view_of
from phalanx.storage import Place, RemotePath, as_place
from phalanx.storage._transfer import download_file

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_ZIP = b"PK\x03\x04"


class TorchFiles:
    """Tensors of ``torch.save``, opened for reading."""

    def __init__(self, path: str | Path | RemotePath) -> None:
        self.path = as_place(path)
        self.bytes_read = 0
        self._tensors: dict[str, Tensor] = {}
        self.others: list[str] = []
        for file in _files_of(self.path):
            for name, value in _leaves(_loaded(file), ""):
                if isinstance(value, Tensor):
                    self._tensors[name] = value
                else:
                    self.others.append(name)

    @staticmethod
    def are_at(path: Place) -> bool:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_ZIP)) == _ZIP
        return (path / SINGLE).is_file() or (path / INDEX).is_file()

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def size(self, name: str) -> torch.Size:
        return self._found(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._found(name).dtype

    def fill(self, name: str, out: Tensor, box: Box) -> None:
        """Read a box of a tensor into ``out``, in the dtype of ``out``."""
        found = self._found(name)
        self.bytes_read += box.volume * found.element_size()
        out.copy_(view_of(found, box, (0,) * found.dim()))

    def _found(self, name: str) -> Tensor:
        if name not in self._tensors:
            known = ", ".join(self.names()[:10])
            raise KeyError(f"no tensor {name!r} in {self.path}; there are {len(self._tensors)}: {known}")
        return self._tensors[name]


def _files_of(path: Place) -> list[Place]:
    if path.is_file():
        return [path]
    if not (path / INDEX).is_file():
        return [path / SINGLE]
    what = str(path / INDEX)
    try:
        weights = Fields(load_json((path / INDEX).read_bytes(), what), what).get("weight_map")
        if not isinstance(weights, dict):
            raise ValueError(f"{what} has no weight_map from names to files")
        names = sorted(set(weights.values()))
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"{what} names {name!r}, which is not a file beside it")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error
    return [path / name for name in names]


def _loaded(file: Place) -> Any:
    """Load what torch maps; of an object in a bucket, a copy that goes with its tensors."""
    try:
        if isinstance(file, RemotePath):
            with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
                copy = Path(folder) / "tensors"
                download_file(file, copy)
                return torch.load(copy, map_location="cpu", weights_only=True, mmap=True)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch has many words for a file that is not what it should be
        raise CheckpointError(
            f"{file} cannot be read as tensors of torch.save: {error}. Files with other objects are not opened: load "
            f"them where you trust them, and save the tensors alone"
        ) from error


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    else:
        yield name or "tensor", value
