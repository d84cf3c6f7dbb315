"""Whole tensors in safetensors files, as other tools write and read them: each rank reads its slices, one rank writes.

Owns ``FullFiles`` (reading) and ``save_full`` (writing): a file, or a folder with ``model.safetensors``, or one with
several files and ``model.safetensors.index.json``. Nothing is unpickled; what the index names must lie in the folder.
Unlike a checkpoint of ``save`` such files have no digests: damage to the bytes of a tensor is not noticed.

Writing, in phases for each file: (1) rank ``dst`` makes the file and maps it; (2) every tensor is gathered into the
mapping in rounds of bounded size; (3) when all are on the disk the folder is renamed into place and all ranks hear how
it went. A rank that cannot write takes what the others send all the same: they must not wait for it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from phalanx._fields import Fields, load_json
from phalanx.comm import Group
from phalanx.shard.checkpoint._gather_state_dict import sharded_entries
from phalanx.shard.exchange._gather import GatheredTensor, gather_tensors
from phalanx.shard.files._index import CheckpointError
from phalanx.shard.files._safetensors import DTYPES, mapped_file, put_in_place, sync_folder
from phalanx.shard.layout._boxes import Box
from phalanx.shard.tensor._tensor import ShardedTensor
from phalanx.storage import Place, RemotePath, as_place
from phalanx.storage._open_tensors import open_tensors
from phalanx.storage._transfer import upload_folder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 << 30


class FullFiles:
    """Tensors in safetensors files, opened for reading: a rank reads what it needs of each."""

    def __init__(self, path: str | Path | RemotePath) -> None:
        self.path = as_place(path)
        self.bytes_read = 0
        self._files = _files_of(self.path)
        self._open: dict[Place, Any] = {}

    @staticmethod
    def are_at(path: Place) -> bool:
        """Return whether there are such files."""
        return path.is_file() or (path / SINGLE).exists() or (path / INDEX).exists()

    def names(self) -> list[str]:
        return sorted(self._files)

    def size(self, name: str) -> torch.Size:
        return torch.Size(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._slice(name).get_dtype()]

    def fill(self, name: str, out: Tensor, box: Box) -> None:
        """Read a box of a tensor into ``out``, in the dtype of ``out``."""
        if not box.volume:
            return
        found = self._slice(name)
        try:
            where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            part = found[where] if where else self._handle(self._files[name]).get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._files[name]} cannot be read: {error}; {name!r} needs it") from error
        self.bytes_read += part.numel() * part.element_size()
        out.copy_(part)

    def _slice(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            known = ", ".join(self.names()[:10])
            raise KeyError(f"no tensor {name!r} in {self.path}; there are {len(self._files)}: {known}")
        try:
            return self._handle(file).get_slice(name)
        except (safetensors.SafetensorError, ValueError) as error:
            raise CheckpointError(f"{file} has no tensor {name!r}, which {self.path / INDEX} says it has") from error

    def _handle(self, file: Place) -> Any:
        if file not in self._open:
            self._open[file] = _opened(file)
        return self._open[file]


def _opened(file: Place) -> Any:
    try:
        return open_tensors(file)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}") from error


def _files_of(path: Place) -> dict[str, Place]:
    """Say in which file each tensor lies."""
    if (path / INDEX).exists():
        return _indexed(path)
    file = path if path.is_file() else path / SINGLE
    return dict.fromkeys(_opened(file).keys(), file)


def _indexed(folder: Place) -> dict[str, Place]:
    what = str(folder / INDEX)
    try:
        fields = Fields(load_json((folder / INDEX).read_bytes(), what), what)
        weights = fields.get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise ValueError(f"{what} has no weight_map from names to files")
        for file in set(weights.values()):
            if Path(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"{what} names {file!r}, which is not a file beside it")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error
    return {name: folder / file for name, file in weights.items()}


def save_full(
    state: Mapping[str, Any],
    path: str | Path | RemotePath,
    *,
    dst: int = 0,
    process_group: Any = None,
    overwrite: bool = False,
    max_file_bytes: int = FILE_BYTES,
    max_bytes: int | None = None,
) -> None:
    """Write whole tensors into a folder of safetensors files that other tools read; collective, rank ``dst`` writes.

    Tensors are gathered one after the other, straight into the files, in rounds of ``max_bytes`` (64 MB): no rank ever
    has the whole state in memory. Plain tensors are written as ``dst`` has them.

    >>> save_full(model.state_dict(), "exported")          # doctest: +SKIP

    Raises:
        CheckpointError: ``dst`` could not write; on all ranks, with the reason. Nothing is left under ``path``.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} is a {type(value).__name__}; full files hold tensors")
    sharded, group = sharded_entries(state, process_group)
    target = as_place(path)
    if isinstance(target, RemotePath):
        _save_to_bucket(state, target, group, dst, overwrite, max_file_bytes, max_bytes)
        return
    folder = target
    partial = folder.with_name(f"{folder.name}.partial")
    problem = ""
    if group.rank == dst:
        problem = _begin(folder, partial, overwrite)
    sizes = {name: value.numel() * value.element_size() for name, value in state.items()}
    files = list(split_into_files(sizes, max_file_bytes))
    for file, names in files:
        told = _write(
            state, sharded, group, dst, None if problem or group.rank != dst else partial / file, names, max_bytes
        )
        problem = problem or told
    if group.rank == dst:
        problem = problem or _finish(state, files, folder, partial)
        if problem:
            shutil.rmtree(partial, ignore_errors=True)
    problem = group.broadcast_value(problem, dst)
    if problem:
        raise CheckpointError(f"saving {folder} failed: rank {dst}: {problem}")


def _save_to_bucket(
    state: Mapping[str, Any],
    target: RemotePath,
    group: Group,
    dst: int,
    overwrite: bool,
    max_file_bytes: int,
    max_bytes: int | None,
) -> None:
    """Write the files on ``dst``'s disk first, then have them in the bucket; the index goes last."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as scratch:  # on all ranks: it costs nothing
        problem, folder = "", Path(scratch) / "files"
        if group.rank == dst:
            problem = _told(lambda: _refuse_existing(target, overwrite))
        problem = group.broadcast_value(problem, dst)
        if not problem:
            save_full(state, folder, dst=dst, process_group=group, max_file_bytes=max_file_bytes, max_bytes=max_bytes)
            if group.rank == dst:
                problem = _told(lambda: upload_files(folder, target))
            problem = group.broadcast_value(problem, dst)
    if problem:
        raise CheckpointError(f"saving {target} failed: rank {dst}: {problem}")


def _refuse_existing(target: RemotePath, overwrite: bool) -> None:
    if not overwrite and target.exists():
        raise FileExistsError(f"{target} exists; pass overwrite=True to replace it")


def _told(action: Callable[[], None]) -> str:
    """Return what went wrong, as text."""
    try:
        action()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def upload_files(folder: Path, target: RemotePath) -> None:
    """Have a folder of files in a bucket; what readers look for first goes last."""
    upload_folder(folder, target, INDEX if (folder / INDEX).exists() else SINGLE)


def _begin(folder: Path, partial: Path, overwrite: bool) -> str:
    try:
        if folder.exists() and not overwrite:
            raise FileExistsError(f"{folder} exists; pass overwrite=True to replace it")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def split_into_files(sizes: Mapping[str, int], max_file_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Deal tensors of so many bytes out to files of at most ``max_file_bytes`` (or one tensor), in order."""
    groups: list[list[str]] = [[]]
    pending = 0
    for name, nbytes in sizes.items():
        if groups[-1] and pending + nbytes > max_file_bytes:
            groups.append([])
            pending = 0
        groups[-1].append(name)
        pending += nbytes
    for number, names in enumerate(groups, 1):
        yield (SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"), names


def _write(
    state: Mapping[str, Tensor],
    sharded: Mapping[str, ShardedTensor],
    group: Group,
    dst: int,
    file: Path | None,
    names: Sequence[str],
    max_bytes: int | None,
) -> str:
    """Gather the tensors of one file into it, on ``dst`` if it has a ``file``; what went wrong there."""
    problem, mapped = "", {}
    with ExitStack() as stack:
        if file is not None:
            try:
                described = {name: (state[name].dtype, state[name].shape) for name in names}
                mapped = stack.enter_context(mapped_file(file, described))
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        for name in names:
            if name in sharded:
                value = sharded[name]
                gather_tensors(
                    group, [GatheredTensor(value.metadata(), value.local_shards(), mapped.get(name))], dst, max_bytes
                )
            elif name in mapped:
                mapped[name].copy_(state[name].detach())
    return problem


def _finish(
    state: Mapping[str, Tensor], files: Sequence[tuple[str, Sequence[str]]], folder: Path, partial: Path
) -> str:
    try:
        if len(files) > 1:
            total = sum(value.numel() * value.element_size() for value in state.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, names in files for name in names},
            }
            with open(partial / INDEX, "w") as out:
                json.dump(index, out, indent=2)
                out.flush()
                os.fsync(out.fileno())
        sync_folder(partial)
        put_in_place(partial, folder, sync=True)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""
