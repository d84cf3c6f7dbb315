"""Saves: every rank writes its shards into one file, rank 0 the index; the checkpoint appears at once or not at all.

Phases: (1) each rank writes ``<folder>.partial/rank-R-of-N.safetensors``; (2) one exchange tells all ranks where every
shard is, or who failed; (3) rank 0 writes the index and renames the folder; (4) a barrier, after which all may read it.
With ``sync`` every file is on the disk before the rename, and the rename before anyone returns. In a bucket the files
have their places at once, under names that no other save has; the index, an object that is replaced as a whole, is the
commit, and what no index names any more is removed after it.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx._signature import resolve_secret
from phalanx.comm import Group
from phalanx.shard.exchange._groups import as_group
from phalanx.shard.files._index import (
    BLOCK,
    INDEX,
    CheckpointError,
    Index,
    StoredShard,
    StoredTensor,
    digest,
    dump_index,
    quick_sum,
)
from phalanx.shard.files._safetensors import NAMES, layout, put_in_place, start_writing, sync_folder
from phalanx.shard.ops._convert import is_first_replica
from phalanx.shard.tensor._tensor import ShardedTensor
from phalanx.storage import RemotePath, as_place
from phalanx.storage._transfer import remove_objects
from phalanx.tensor import DTensor

_AHEAD = 4 << 20  # bytes after which the disk is told to begin
_OWN = re.compile(r"rank-\d+-of-\d+-[0-9a-f]+\.safetensors")


class _SavedBox(NamedTuple):
    """A local tensor to store, and the box that it is."""

    name: str
    offsets: list[int]
    tensor: Tensor


def save(
    state: Mapping[str, Any],
    path: str | Path | RemotePath,
    *,
    process_group: Any = None,
    overwrite: bool = False,
    sync: bool = True,
    secret: bytes | None = None,
) -> None:
    """Write a sharded checkpoint to a folder or URL (``s3://bucket/run``). Collective; all ranks pass the same names.

    ShardedTensors and DTensors are stored shard by shard, plain tensors as rank 0 has them. ``sync`` waits until the
    disk has the bytes. An existing checkpoint is only replaced with ``overwrite``, after the new one is complete.
    With a ``secret`` (default: PHALANX_CHECKPOINT_SECRET) the index is signed; ``b""`` means none.

    >>> save(model.state_dict(), "checkpoints/step-100")        # doctest: +SKIP

    Raises:
        CheckpointError: a rank could not write; the message names it. Nothing is left behind under ``path``.
    """
    group = as_group(process_group)
    folder = as_place(path)
    target = (
        _CheckpointObjects.begin(folder, group) if isinstance(folder, RemotePath) else _CheckpointFolder(folder, sync)
    )
    told = _try(lambda: _write_own(state, target, group, overwrite))
    heard = group.all_gather_values(told)
    failures = [f"rank {rank}: {entry['error']}" for rank, entry in enumerate(heard) if "error" in entry]
    result: dict[str, Any] = {}
    if group.rank == 0:
        if not failures:
            result = _try(lambda: target.finish(_merge(state, heard), resolve_secret(secret)))
        if failures or "error" in result:
            target.remove()
    result = group.broadcast_value(result, 0)
    if "error" in result:
        failures.append(f"rank 0: {result['error']}")
    if failures:
        raise CheckpointError(f"saving {folder} failed: {'; '.join(failures)}")


def _try(action: Any) -> dict[str, Any]:
    """Return the result, or the error as text: the other ranks must hear of it before anyone raises."""
    try:
        result: dict[str, Any] = action()
        return result
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _pieces(state: Mapping[str, Any], rank: int) -> list[_SavedBox]:
    pieces = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name!r} is a {type(value).__name__}; a checkpoint holds tensors")
        if isinstance(value, DTensor):
            coordinate = value.device_mesh.get_coordinate()
            if coordinate is not None and is_first_replica(value, coordinate):
                pieces += [_SavedBox(name, list(held.offsets), held.tensor) for held in value._held_boxes("save")]
        elif isinstance(value, ShardedTensor):
            pieces += [_SavedBox(name, s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
        elif rank == 0:
            pieces.append(_SavedBox(name, [0] * value.dim(), value))
    return pieces


def _write_own(
    state: Mapping[str, Any], target: _CheckpointFolder | _CheckpointObjects, group: Group, overwrite: bool
) -> dict[str, Any]:
    if target.is_there() and not overwrite:
        raise FileExistsError(f"{target.place} exists; pass overwrite=True to replace it")
    pieces = _pieces(state, group.rank)
    file = f"rank-{group.rank:05d}-of-{group.size:05d}{target.suffix}.safetensors"
    keys = [f"{piece.name}/{number}" for number, piece in enumerate(pieces)]
    described = {key: (piece.tensor.dtype, piece.tensor.shape) for key, piece in zip(keys, pieces, strict=True)}
    head, entries, size = layout(described)
    shards: dict[str, list[Any]] = {}
    quick_of = quick_sum()

    def blocks() -> Iterator[memoryview]:
        """Digest each block and hand it on while it is still in the cache."""
        yield memoryview(head)
        for key, piece in sorted(zip(keys, pieces, strict=True), key=lambda pair: entries[pair[0]].begin):
            data, sums, quick = _bytes(piece.tensor), [], []
            for begin in range(0, len(data), BLOCK):
                block = data[begin : begin + BLOCK]
                sums.append(digest(block))
                if quick_of is not None:
                    quick.append(quick_of(block))
                yield block
            shards.setdefault(piece.name, []).append(
                [piece.offsets, list(piece.tensor.shape), file, entries[key].begin, sums, quick]
            )

    target.write(file, blocks(), size)
    return {"file": file, "nbytes": size, "shards": shards, "names": sorted(state)}


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


class _Ahead:
    """Writes to a raw file and, if it will be synced, has the disk work on what is there while more is digested."""

    def __init__(self, raw: io.FileIO, sync: bool) -> None:
        self._raw, self._sync = raw, sync
        self._written = self._started = 0

    def write(self, data: memoryview) -> None:
        while len(data):
            count = self._raw.write(data)  # a raw write may take less than it was given
            data = data[count:]
            self._written += count
        if self._sync and self._written - self._started >= _AHEAD:
            start_writing(self._raw.fileno(), self._started, self._written - self._started)
            self._started = self._written


def _merge(state: Mapping[str, Any], heard: list[dict[str, Any]]) -> Index:
    for rank, entry in enumerate(heard):
        if entry["names"] != heard[0]["names"]:
            odd = sorted(set(entry["names"]) ^ set(heard[0]["names"]))
            raise ValueError(f"rank {rank} saves other tensors than rank 0: {odd[:5]}")
    tensors = {}
    for name, value in state.items():
        shards = [StoredShard(*shard) for entry in heard for shard in entry["shards"].get(name, [])]
        tensors[name] = StoredTensor(NAMES[value.dtype], list(value.shape), shards)
    return Index(tensors, {entry["file"]: entry["nbytes"] for entry in heard})


class _CheckpointFolder:
    """A folder of this machine, or of a disk that all ranks share, in the making."""

    suffix = ""

    def __init__(self, place: Path, sync: bool) -> None:
        self.place, self._sync = place, sync
        self._partial = place.with_name(f"{place.name}.partial")

    def is_there(self) -> bool:
        return self.place.exists()

    def write(self, file: str, blocks: Iterator[memoryview], size: int) -> None:
        self._partial.mkdir(parents=True, exist_ok=True)
        with open(self._partial / file, "wb", buffering=0) as raw:
            out = _Ahead(raw, self._sync)
            for block in blocks:
                out.write(block)
            if self._sync:
                os.fsync(raw.fileno())

    def finish(self, index: Index, secret: bytes) -> dict[str, Any]:
        for stray in self._partial.iterdir():
            if stray.name not in index.files:  # of an earlier save that died
                stray.unlink()
        with open(self._partial / INDEX, "w") as out:
            out.write(dump_index(index, secret))
            out.flush()
            if self._sync:
                os.fsync(out.fileno())
        if self._sync:
            sync_folder(self._partial)
        put_in_place(self._partial, self.place, sync=self._sync)
        return {}

    def remove(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class _CheckpointObjects:
    """A checkpoint in a bucket, in the making."""

    def __init__(self, place: RemotePath, suffix: str) -> None:
        self.place, self.suffix = place, suffix

    @classmethod
    def begin(cls, place: RemotePath, group: Group) -> _CheckpointObjects:
        """Agree on a name that no other save has: an index never names files of two saves."""
        return cls(place, group.broadcast_value(f"-{secrets.token_hex(4)}", 0))

    def is_there(self) -> bool:
        return (self.place / INDEX).is_file()

    def write(self, file: str, blocks: Iterator[memoryview], size: int) -> None:
        target = self.place / file
        target.bucket.put(target.key, blocks, size=size)

    def finish(self, index: Index, secret: bytes) -> dict[str, Any]:
        (self.place / INDEX).write_bytes(dump_index(index, secret).encode())
        self._clear(lambda name: _OWN.fullmatch(name) is not None and name not in index.files)
        return {}

    def remove(self) -> None:
        """Remove the files of this save; if that fails too, the next save does it."""
        try:
            self._clear(lambda name: name.endswith(f"{self.suffix}.safetensors"))
        except OSError:
            pass

    def _clear(self, is_stray: Callable[[str], bool]) -> None:
        remove_objects(self.place, [name for name, _ in self.place.walk() if is_stray(name)])
