"""The index of a sharded checkpoint: which file holds which box of which tensor, and the checksums of its bytes.

Owns the JSON format and its checks. A checkpoint is a folder: ``index.json`` and one safetensors file per rank. Each
stored shard is checksummed in blocks, so that a reader can trust a part of it without reading the rest. The index is
written last and the folder renamed as a whole: a checkpoint is there completely or not at all.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.shard._boxes import Box
from phalanx.shard._metadata import ShardMetadata
from phalanx.shard._spec import check_cover, check_no_overlap

INDEX = "index.json"
BLOCK = 1 << 20
_VERSION = 1


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint cannot be read or written; the message names the file and the tensor."""


@dataclass(frozen=True)
class StoredShard:
    """One box of a tensor: ``begin`` bytes into ``file``; ``sums`` are the checksums of its blocks."""

    offsets: list[int]
    sizes: list[int]
    file: str
    begin: int
    sums: list[int]

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.sizes))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor; ``dtype`` as safetensors spells it."""

    dtype: str
    size: list[int]
    shards: list[StoredShard]


@dataclass(frozen=True)
class Index:
    """The whole checkpoint; ``files`` gives the size of each file in bytes."""

    tensors: dict[str, StoredTensor]
    files: dict[str, int]


def checksum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def block_sum(data: Any) -> int:
    """Of one block. A CRC finds damage at twice the speed of a cryptographic hash; no secret protects either."""
    return zlib.crc32(data)


def dump_index(index: Index) -> str:
    body = json.dumps({"version": _VERSION, **asdict(index)}, sort_keys=True, separators=(",", ":"))
    return json.dumps({"checksum": checksum(body.encode()), "body": body})


def read_index(folder: Path) -> Index:
    """Raises CheckpointError if there is none, or it is torn, changed, or of another version."""
    path = folder / INDEX
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no checkpoint at {folder}: {path} is missing (an unfinished save leaves none)"
        ) from error
    try:
        outer = json.loads(text)
        body = outer["body"]
        if checksum(body.encode()) != outer["checksum"]:
            raise CheckpointError(f"{path} was changed after it was written: its checksum does not match")
        inner = json.loads(body)
        if inner["version"] != _VERSION:
            raise CheckpointError(
                f"{path} has version {inner['version']!r}; this reader knows version {_VERSION}"
            )
        return _parse(inner, path)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is torn or no index of a checkpoint ({type(error).__name__}: {error})"
        ) from error


def _parse(inner: dict[str, Any], path: Path) -> Index:
    tensors = {}
    for name, entry in inner["tensors"].items():
        shards = [StoredShard(**shard) for shard in entry["shards"]]
        described = [ShardMetadata(shard.offsets, shard.sizes) for shard in shards]
        check_no_overlap(described)
        check_cover(described, entry["size"])
        tensors[name] = StoredTensor(entry["dtype"], entry["size"], shards)
    for file in inner["files"]:
        if Path(file).name != file:
            raise CheckpointError(f"{path} names a file outside its folder: {file!r}")
    return Index(tensors, inner["files"])
