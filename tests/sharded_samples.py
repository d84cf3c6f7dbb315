"""Small sharded datasets on disk, in every format, made on the spot; and a source in memory that counts its opens."""

from __future__ import annotations

import io
import json
import random
import struct
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from phalanx.data import ShardedDataset, ShardReader, ShardSource
from phalanx.data.sources import ParquetSource, TarSource


def numbers_of(sizes: Sequence[int]) -> list[range]:
    """Which samples each shard has, if they are numbered through."""
    starts = [sum(sizes[:shard]) for shard in range(len(sizes) + 1)]
    return [range(*starts[shard : shard + 2]) for shard in range(len(sizes))]


class Numbers(ShardSource):
    """Sample i is the number i; counts how often each shard was opened and which were prepared."""

    def __init__(self, sizes: Sequence[int], words: Sequence[int] | None = None) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self.fingerprints = np.array([0] * len(sizes) if words is None else words, dtype=np.uint64)
        self.starts = np.concatenate(([0], np.cumsum(self.sizes)))
        self.opened: Counter[int] = Counter()
        self.prepared: list[int] = []
        self.open_now: set[int] = set()
        self.most_open = 0

    def name_of(self, shard: int) -> str:
        return f"numbers-{shard:03d}"

    def open(self, shard: int) -> ShardReader:
        self.opened[shard] += 1
        self.open_now.add(shard)
        self.most_open = max(self.most_open, len(self.open_now))
        return NumbersReader(self, shard)

    def prepare(self, shard: int) -> None:
        self.prepared.append(shard)


class NumbersReader(ShardReader):
    def __init__(self, source: Numbers, shard: int) -> None:
        self.source, self.shard = source, shard

    def read(self, offsets: Sequence[int]) -> list[int]:
        assert all(0 <= offset < self.source.sizes[self.shard] for offset in offsets)
        return [int(self.source.starts[self.shard]) + offset for offset in offsets]

    def close(self) -> None:
        self.source.open_now.discard(self.shard)


def content_of(number: int) -> np.ndarray:
    """What stands in a sample: four values that tell it from every other."""
    return np.random.default_rng(number).normal(size=4).astype(np.float32)


def write_tars(folder: Path, sizes: Sequence[int], form: int = tarfile.PAX_FORMAT) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard, numbers in enumerate(numbers_of(sizes)):
        paths.append(folder / f"train-{shard:04d}.tar")
        with tarfile.open(paths[-1], "w", format=form) as archive:
            for number in numbers:
                add(archive, f"{number:06d}.x", content_of(number).tobytes())
                add(archive, f"{number:06d}.Cls", str(number % 3).encode())
    return paths


def add(archive: tarfile.TarFile, name: str, content: bytes, mtime: float = 1.5) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(content), mtime
    archive.addfile(info, io.BytesIO(content))


def write_parquets(folder: Path, sizes: Sequence[int], rows: int) -> list[Path]:
    """Files of ``sizes`` rows, in row groups of ``rows``."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard, numbers in enumerate(numbers_of(sizes)):
        values = [content_of(number) for number in numbers]
        kind = pyarrow.list_(pyarrow.float32())
        columns = {
            "x": pyarrow.array([value.tolist() for value in values], kind),
            "cls": pyarrow.array([number % 3 for number in numbers], pyarrow.int64()),
        }
        paths.append(folder / f"train-{shard:04d}.parquet")
        pyarrow.parquet.write_table(pyarrow.table(columns), paths[-1], row_group_size=rows)
    return paths


def encode_mds(encoding: str, value: object) -> bytes:
    """What an encoding's bytes are; written from the format's description, for the few kinds that tests use."""
    if encoding == "str":
        return str(value).encode()
    if encoding == "bytes":
        return bytes(value)  # type: ignore[call-overload]
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding == "int":
        return struct.pack("<q", value)
    if encoding == "ndarray":
        array = np.asarray(value)
        codes = {"uint8": 8, "int32": 33, "float32": 34, "int64": 65}
        head = bytes([codes[array.dtype.name], (array.ndim << 2)]) + bytes(array.shape)
        return head + array.tobytes()
    if encoding.startswith("ndarray:"):
        return np.asarray(value).tobytes()
    return np.asarray(value).astype(encoding).tobytes()


def write_mds(folder: Path, columns: dict[str, str], shards: Sequence[Sequence[dict[str, object]]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {"int": 8, "float32": 4, "uint8": 1, "int64": 8, "ndarray:int32:2,3": 24}
    names = sorted(columns)
    infos = []
    for number, samples in enumerate(shards):
        bodies = []
        for sample in samples:
            data = [encode_mds(columns[name], sample[name]) for name in names]
            sizes = [len(d) for d, name in zip(data, names, strict=True) if columns[name] not in fixed]
            bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data))
        info = {
            "column_encodings": [columns[name] for name in names],
            "column_names": names,
            "column_sizes": [fixed.get(columns[name]) for name in names],
            "compression": None, "format": "mds", "hashes": [], "samples": len(samples), "size_limit": 1 << 26,
            "version": 2, "zip_data": None,
        }  # fmt: skip
        config = json.dumps(info).encode()
        first = 4 + 4 * (len(bodies) + 1) + len(config)
        edges = np.cumsum([first, *map(len, bodies)]).astype("<u4")
        content = struct.pack("<I", len(bodies)) + edges.tobytes() + config + b"".join(bodies)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(content)
        infos.append({**info, "raw_data": {"basename": name, "bytes": len(content), "hashes": {}}})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": infos}))
    return folder


def plain_pair(sample: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model takes of a sample of either format."""
    x = sample["x"]
    values = torch.from_numpy(np.frombuffer(x, np.float32).copy() if isinstance(x, bytes) else np.array(x))
    return values, torch.tensor(int(sample["cls"]))  # type: ignore[call-overload]


def pair(sample: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``plain_pair``, with noise from two global generators."""
    x, y = plain_pair(sample)
    return x + 0.1 * torch.randn(4) + 0.1 * random.random(), y


def tar_dataset(folder: Path) -> ShardedDataset:
    return ShardedDataset(TarSource(sorted(folder.glob("*.tar"))), pair)


def parquet_dataset(folder: Path) -> ShardedDataset:
    return ShardedDataset(ParquetSource(sorted(folder.glob("*.parquet"))), pair)
