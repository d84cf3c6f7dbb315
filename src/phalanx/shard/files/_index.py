"""Keeps the index of a sharded checkpoint: which file holds which box of which tensor, and the digests of its bytes.

Owns the JSON format and its checks. A checkpoint is a folder: ``index.json`` and one safetensors file per rank. Each
stored shard has a BLAKE3 digest per block, so that a reader can trust a part of it without reading the rest; the index
has one of itself and, with a secret, an HMAC: then nobody without the secret can change anything unnoticed. Without a
secret only damage can be found, and a second, quick sum per block finds it in a tenth of the time; whoever cannot make
it leaves it out, and whoever does not know it ignores it. The index is written last and the folder renamed as a whole:
a checkpoint is there completely or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from phalanx._fields import MAX_INTEGER, Fields, load_json, short
from phalanx._signature import sign, signature_problem
from phalanx.errors import PhalanxError
from phalanx.shard.files._safetensors import DTYPES
from phalanx.shard.layout._boxes import Box
from phalanx.shard.layout._tiling import MAX_DIMS, find_fault
from phalanx.storage import Place

INDEX = "index.json"
BLOCK = 1 << 20
_VERSION = 2


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint cannot be read or written; the message names the file and the tensor."""


@dataclass(frozen=True)
class StoredShard:
    """One box of a tensor: ``begin`` bytes into ``file``; ``sums`` are the digests of its blocks,
    ``quick`` their quick sums, if there are any."""

    offsets: list[int]
    sizes: list[int]
    file: str
    begin: int
    sums: list[str]
    quick: list[str] = field(default_factory=list)

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
    from blake3 import blake3  # start-up: only checkpoints need it

    return blake3(data).hexdigest(16)


def quick_sum() -> Callable[[Any], str] | None:
    """Return what finds damage quickly and no forgery, if it is installed (extra ``fast``)."""
    try:
        from xxhash import xxh3_128_hexdigest  # start-up: only checkpoints need it
    except ImportError:
        return None
    return xxh3_128_hexdigest


def dump_index(index: Index, secret: bytes) -> str:
    body = json.dumps({"version": _VERSION, **asdict(index)}, sort_keys=True, separators=(",", ":"))
    outer = {"checksum": digest(body.encode()), "body": body}
    return json.dumps({**outer, "mac": sign(secret, body)} if secret else outer)


def read_index(folder: Place, secret: bytes) -> Index:
    """Raises CheckpointError if there is none, or it is torn, changed, of another version, or badly signed.

    An index that is returned is sound: every shard lies inside its file, and the shards of a tensor fill it exactly.
    """
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"no checkpoint at {folder}: {path} is missing (an unfinished save leaves none)"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_index(data, secret, str(path))


def parse_index(data: bytes, secret: bytes, path: str) -> Index:
    """Return the index in ``data``; ``path`` is for messages."""
    try:
        outer = Fields(load_json(data, "it"), "it")
        body = outer.text("body")
        if digest(body.encode()) != outer.text("checksum"):
            raise CheckpointError(f"{path} was changed after it was written: its checksum does not match")
        if problem := signature_problem(secret, body, outer.get("mac"), remedy='pass secret=b""'):
            raise CheckpointError(f"{path} {problem}")
        inner = Fields(load_json(body, "its body"), "its body")
        if inner.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has version {short(inner.get('version'))}; this reader knows version {_VERSION}"
            )
        return _parse(inner)
    except ValueError as error:
        raise CheckpointError(f"{path} is torn or no index of a checkpoint: {error}") from error


def _parse(inner: Fields) -> Index:
    sizes = Fields(inner.mapping("files"), "files")
    files = {name: sizes.integer(name, low=0) for name in inner.mapping("files")}
    for file in files:
        if Path(file).name != file or "\0" in file:
            raise ValueError(f"it names a file outside its folder: {short(file)}")
    return Index({name: _parse_tensor(name, entry, files) for name, entry in inner.mapping("tensors").items()}, files)


def _parse_tensor(name: str, entry: Any, files: dict[str, int]) -> StoredTensor:
    what = f"tensor {short(name)}"
    fields = Fields(entry, what)
    dtype, size = DTYPES.get(fields.text("dtype")), fields.integers("size", low=0)
    if dtype is None:
        raise ValueError(f"{what} has the unknown dtype {short(fields.get('dtype'))}")
    if len(size) > MAX_DIMS or prod(length or 1 for length in size) * dtype.itemsize > MAX_INTEGER:
        raise ValueError(f"{what} has the size {short(size)}, which no tensor has")
    shards = [_parse_shard(what, shard, size, dtype.itemsize, files) for shard in fields.items("shards")]
    fault = find_fault([shard.box for shard in shards], size)
    if fault is not None:
        point, holders = fault
        if not holders:
            raise ValueError(f"{what}: no shard holds the element at {list(point)}; size {size}")
        pair = [shards[index] for index in holders[:2]]
        raise ValueError(
            f"{what}: shards overlap at {list(point)}: offsets {pair[0].offsets}, sizes {pair[0].sizes} and "
            f"offsets {pair[1].offsets}, sizes {pair[1].sizes}"
        )
    return StoredTensor(fields.text("dtype"), size, shards)


def _parse_shard(what: str, entry: Any, size: list[int], itemsize: int, files: dict[str, int]) -> StoredShard:
    fields = Fields(entry, f"a shard of {what}")
    shard = StoredShard(
        fields.integers("offsets", low=0),
        fields.integers("sizes", low=0),
        fields.text("file"),
        fields.integer("begin", low=0),
        list(fields.texts("sums")),
        list(fields.texts("quick", default=[])),
    )
    if not len(shard.offsets) == len(shard.sizes) == len(size):
        raise ValueError(f"a shard of {what} has another number of dims than its size {size}")
    nbytes = shard.box.volume * itemsize
    inside = zip(shard.offsets, shard.sizes, size, strict=True)
    if any(length > whole or (nbytes and begin + length > whole) for begin, length, whole in inside):
        raise ValueError(f"{what}: the shard at {shard.offsets} of sizes {shard.sizes} lies outside of size {size}")
    if shard.file not in files:
        raise ValueError(f"a shard of {what} lies in {short(shard.file)}, which is not among the files")
    if shard.begin + nbytes > files[shard.file] or len(shard.sums) != -(-nbytes // BLOCK):
        raise ValueError(f"a shard of {what} does not lie inside {shard.file}; the index is wrong")
    if len(shard.quick) not in (0, len(shard.sums)):
        raise ValueError(f"a shard of {what} has {len(shard.quick)} quick sums for {len(shard.sums)} blocks")
    return shard
