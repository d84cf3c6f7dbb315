"""The index of a sharded checkpoint: which file holds which box of which tensor, and the digests of its bytes.

Owns the JSON format and its checks. A checkpoint is a folder: ``index.json`` and one safetensors file per rank. Each
stored shard has a BLAKE3 digest per block, so that a reader can trust a part of it without reading the rest; the index
has one of itself and, with a secret, an HMAC: then nobody without the secret can change anything unnoticed. The index
is written last and the folder renamed as a whole: a checkpoint is there completely or not at all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.shard._boxes import Box
from phalanx.shard._metadata import ShardMetadata
from phalanx.shard._spec import check_cover, check_no_overlap

ENV_SECRET = "PHALANX_CHECKPOINT_SECRET"
INDEX = "index.json"
BLOCK = 1 << 20
_VERSION = 2


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint cannot be read or written; the message names the file and the tensor."""


@dataclass(frozen=True)
class StoredShard:
    """One box of a tensor: ``begin`` bytes into ``file``; ``sums`` are the digests of its blocks."""

    offsets: list[int]
    sizes: list[int]
    file: str
    begin: int
    sums: list[str]

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


def digest(data: Any) -> str:
    """BLAKE3, which no one can forge and which is faster than a CRC; 128 bits of it."""
    from blake3 import blake3  # only checkpoints need it

    return blake3(data).hexdigest(16)


def _mac(secret: bytes, body: str) -> str:
    return hmac.new(secret, body.encode(), hashlib.sha256).hexdigest()


def resolve_secret(secret: bytes | None) -> bytes:
    """The secret to use: the given one, else the environment's; empty for none.

    Not the job's secret: a checkpoint outlives the job that wrote it.
    """
    return os.environ.get(ENV_SECRET, "").encode() if secret is None else secret


def dump_index(index: Index, secret: bytes) -> str:
    body = json.dumps({"version": _VERSION, **asdict(index)}, sort_keys=True, separators=(",", ":"))
    outer = {"checksum": digest(body.encode()), "body": body}
    return json.dumps({**outer, "mac": _mac(secret, body)} if secret else outer)


def read_index(folder: Path, secret: bytes) -> Index:
    """Raises CheckpointError if there is none, or it is torn, changed, of another version, or badly signed."""
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
        if digest(body.encode()) != outer["checksum"]:
            raise CheckpointError(f"{path} was changed after it was written: its checksum does not match")
        if secret:
            _check_mac(path, secret, body, outer.get("mac"))
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


def _check_mac(path: Path, secret: bytes, body: str, mac: Any) -> None:
    if mac is None:
        raise CheckpointError(
            f"{path} is not signed, but there is a secret; if it was saved without one and you trust it, "
            f'pass secret=b"" to read it'
        )
    if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), _mac(secret, body).encode()):
        raise CheckpointError(
            f"{path} was tampered with, or saved with another secret: its signature does not match"
        )


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
