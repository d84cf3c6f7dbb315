"""Reads MDS shards, the format of MosaicML Streaming, without its package: a source of shards.

Owns the format as far as it holds values: index.json, the table of offsets of a shard, and the encodings of columns. A
column of pickles is refused: reading one runs code. Images are handed out as their encoded bytes.

A shard is: uint32 number of samples n, n + 1 uint32 offsets, then the samples. A sample is a uint32 size for each
column without a fixed one, then the columns.
"""

from __future__ import annotations

import decimal
import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phalanx.data._permutation import Indices
from phalanx.data.shards._shard_source import ShardReader
from phalanx.data.sources._node_cache import NodeCache
from phalanx.data.sources._shard_files import Fetch, FileReader, FileSource, ShardFiles, fingerprint

_SCALARS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}
_SIZES_OF_DIMS = ("<u1", "<u2", "<u4", "<u8")
_DTYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
_PLAIN: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda data: data.decode(),
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "json": json.loads,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: decimal.Decimal(data.decode()),
    **dict.fromkeys(("jpeg", "png", "pil", "jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]"), bytes),
}


def decoder(encoding: str, column: str) -> Callable[[bytes], Any]:
    """Return what makes a value of a column's bytes; refuse pickles, and what is not known.

    >>> decoder("ndarray:int16:2", "x")(bytes([1, 0, 2, 0])).tolist()
    [1, 2]
    """
    kind, _, options = encoding.partition(":")
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _SCALARS:
        dtype = np.dtype(kind).newbyteorder("<")
        return lambda data: np.frombuffer(data, dtype)[0]
    if kind == "ndarray":
        name, _, shape = options.partition(":")
        fixed = tuple(map(int, shape.split(","))) if shape else None
        return lambda data: _array(data, name, fixed)
    if kind == "pkl":
        raise ValueError(
            f"column {column!r} holds pickles, which run code when they are read; write it anew as 'json', "
            "'ndarray' or 'bytes'"
        )
    raise ValueError(
        f"column {column!r} has encoding {encoding!r}; known are {', '.join(sorted({*_PLAIN, *_SCALARS}))}"
    )


def _array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> Any:
    position = 0
    if not dtype:
        dtype, position = _DTYPES[data[0]], 1
    if shape is None:
        num_dims, size = data[position] >> 2, 1 << (data[position] & 3)
        stop = position + 1 + num_dims * size
        found = np.frombuffer(data[position + 1 : stop], _SIZES_OF_DIMS[data[position] & 3])
        shape, position = tuple(found.tolist()), stop
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=position, count=math.prod(shape))
    return values.reshape(shape).copy()  # writable: torch warns of arrays that are not


class MDSSource(FileSource):
    """Samples of a folder with ``index.json`` and MDS shards, as dicts by column.

    Columns with images give their bytes ("pil": width, height and mode before them). Compressed shards are refused;
    ``fetch`` and ``cache`` bring shards to this node as for ``TarSource``, the index must be in ``folder``.

    >>> source = MDSSource("train")                                                          # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, *, cache: NodeCache | None = None, fetch: Fetch | None = None) -> None:
        path = Path(folder) / "index.json"
        about = json.loads(path.read_bytes())
        if about.get("version") != 2:
            raise ValueError(f"{path} has version {about.get('version')!r}; expected 2")
        self.infos: list[Mapping[str, Any]] = about["shards"]
        for info in self.infos:
            _check(info, path)
        names = [str(Path(folder) / info["raw_data"]["basename"]) for info in self.infos]
        self.files = ShardFiles(names, cache, fetch)
        self.sizes: Indices = np.array([info["samples"] for info in self.infos], dtype=np.int64)
        words = [fingerprint(json.dumps(info, sort_keys=True)) for info in self.infos]
        self.fingerprints = np.array(words, dtype=np.uint64)

    def open(self, shard: int) -> ShardReader:
        return _MDSReader(self.files.open(shard), self.name_of(shard), self.infos[shard])


def _check(info: Mapping[str, Any], path: Path) -> None:
    name = info["raw_data"]["basename"]
    if info.get("format") != "mds" or info.get("version") != 2:
        raise ValueError(f"{path}: {name} has format {info.get('format')!r}; expected 'mds' of version 2")
    if info.get("compression"):
        raise ValueError(f"{path}: {name} is compressed with {info['compression']}; unpack it, or write it without")
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{path}: {name!r} is no name of a file in this folder")
    for column, encoding in zip(info["column_names"], info["column_encodings"], strict=True):
        decoder(encoding, column)


class _MDSReader(FileReader):
    def __init__(self, file: BinaryIO, name: str, info: Mapping[str, Any]) -> None:
        super().__init__(file, name)
        names, encodings = info["column_names"], info["column_encodings"]
        self.columns = list(zip(names, map(decoder, encodings, names), info["column_sizes"], strict=True))
        self.num_sizes = sum(not size for size in info["column_sizes"])
        (count,) = struct.unpack("<I", self.bytes_at(0, 4, "the number of samples"))
        if count != info["samples"]:
            raise ValueError(
                f"{name} has {count} samples, but index.json says {info['samples']}; they do not belong together"
            )
        self.edges = np.frombuffer(self.bytes_at(4, 4 * (count + 1), "the table of samples"), "<u4")

    def sample(self, offset: int) -> dict[str, Any]:
        first, stop = self.edges[offset : offset + 2].tolist()
        data = self.bytes_at(first, stop - first, f"sample {offset}")
        position = 4 * self.num_sizes
        sizes = iter(struct.unpack_from(f"<{self.num_sizes}I", data))
        found = {}
        for name, decode, fixed in self.columns:
            size = fixed or next(sizes)
            found[name] = decode(data[position : position + size])
            position += size
        if position != len(data):
            raise ValueError(
                f"{self.name}: sample {offset} has {len(data)} bytes, but its columns {position}; it is damaged"
            )
        return found
