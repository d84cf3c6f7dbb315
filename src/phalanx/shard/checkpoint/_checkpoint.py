"""Reads a checkpoint of ours under any layout, each rank only the byte ranges that its boxes need; no collectives.

Files are mapped, and every block of which a byte is used is checked against the index first. Nothing is unpickled.
"""

from __future__ import annotations

import io
import itertools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx._signature import resolve_secret
from phalanx.comm.torch_interop._dcp import HeldBox
from phalanx.shard.files._index import (
    BLOCK,
    CheckpointError,
    StoredShard,
    StoredTensor,
    digest,
    quick_sum,
    read_index,
)
from phalanx.shard.files._safetensors import DTYPES
from phalanx.shard.layout._boxes import Box, intersect, view_of
from phalanx.shard.tensor._sharding_spec import ShardingSpec
from phalanx.shard.tensor._tensor import ShardedTensor
from phalanx.storage import Place, RemotePath, as_place
from phalanx.tensor import DTensor

_MANY_RUNS = 4096


class Checkpoint:
    """A saved state, opened for reading.

    >>> saved = Checkpoint("checkpoints/step-100")                              # doctest: +SKIP
    >>> table = saved.load("table.weight", ChunkShardingSpec(0, placements))    # doctest: +SKIP

    With a ``secret`` (default: PHALANX_CHECKPOINT_SECRET) only an index that was signed with it is accepted;
    ``b""`` means none. Bytes are then checked by their BLAKE3 digests; without one, where only damage can be found, by
    the quick sums beside them, if the checkpoint has them and this process can make them (extra ``fast``).
    ``verify="full"`` compares digests in any case, ``verify=False`` trusts the files' bytes.
    """

    def __init__(
        self, path: str | Path | RemotePath, *, verify: bool | Literal["full"] = True, secret: bytes | None = None
    ) -> None:
        self.path = as_place(path)
        self.bytes_read = 0
        self._verify = bool(verify)
        key = resolve_secret(secret)
        self._quick_of = None if key or verify == "full" else quick_sum()
        self._index = read_index(self.path, key)
        self._maps: dict[str, mmap.mmap] = {}
        self._checked: set[tuple[str, int]] = set()
        self._sizes: dict[str, int] = {}

    def names(self) -> list[str]:
        return sorted(self._index.tensors)

    def size(self, name: str) -> torch.Size:
        return torch.Size(self._stored(name).size)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._stored(name).dtype]

    def load(self, name: str, sharding_spec: ShardingSpec, *, process_group: Any = None) -> ShardedTensor:
        """Return one tensor under a spec, on any group."""
        made = ShardedTensor(sharding_spec, self.size(name), dtype=self.dtype(name), process_group=process_group)
        self.read_into(name, made)
        return made

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return one tensor, or a box of it, as a plain tensor."""
        box = Box.of_size(self.size(name)) if box is None else box
        out = torch.empty(box.sizes, dtype=self.dtype(name))
        self.fill(name, out, box)
        return out

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill a ShardedTensor, a DTensor or a plain tensor; each rank reads what it holds."""
        read_into(self, name, target)

    def _stored(self, name: str) -> StoredTensor:
        stored = self._index.tensors.get(name)
        if stored is None:
            known = ", ".join(self.names()[:10])
            raise KeyError(f"no tensor {name!r} in {self.path}; there are {len(self._index.tensors)}: {known}")
        return stored

    def fill(self, name: str, out: Tensor, box: Box) -> None:
        """Read a box of a tensor into ``out``."""
        stored = self._stored(name)
        dtype = DTYPES[stored.dtype]
        for shard in stored.shards:
            common = intersect(shard.box, box)
            if common is None:
                continue
            wanted = view_of(out, common, box.offsets)
            if common == shard.box and wanted.dtype == dtype and wanted.is_contiguous() and is_host(wanted):
                self._read_whole(name, shard, wanted)
            else:
                wanted.copy_(view_of(self._map(name, shard, dtype, common), common, shard.offsets))

    def _read_whole(self, name: str, shard: StoredShard, out: Tensor) -> None:
        """Read a complete stored shard, straight from the file into the tensor, block by block."""
        data = out.view(-1).view(torch.uint8).numpy().data
        self._check_place(name, shard, len(data))
        path = self.path / shard.file
        if isinstance(path, RemotePath):
            with self._told(name, path):
                path.read_into(shard.begin, data)
            for block in range(len(shard.sums)):
                self._check(name, shard, data, block, known=False)
            return
        with self._opened(name, shard.file) as file:
            file.seek(shard.begin)
            for block in range(len(shard.sums)):
                part = data[block * BLOCK : (block + 1) * BLOCK]
                filled = 0
                while filled < len(part):
                    count = file.readinto(part[filled:])
                    if not count:
                        raise CheckpointError(f"{self.path / shard.file} ends early; {name!r} needs more of it")
                    filled += count
                self._check(name, shard, data, block, known=False)

    def _map(self, name: str, shard: StoredShard, dtype: torch.dtype, common: Box) -> Tensor:
        """Return the stored shard as a tensor over the mapped file, with the blocks that hold ``common`` checked."""
        nbytes = shard.box.volume * dtype.itemsize
        self._check_place(name, shard, nbytes)
        blocks = [range(begin // BLOCK, -(-end // BLOCK)) for begin, end in runs(common, shard.box, dtype.itemsize)]
        is_mapped = not isinstance(self.path, RemotePath)
        if not is_mapped:
            memory, start = self._fetch(name, shard, nbytes, blocks), 0
        else:
            memory, start = self._map_file(name, shard.file), shard.begin
        data = memoryview(memory)[start : start + nbytes]
        for block in itertools.chain.from_iterable(blocks):
            self._check(name, shard, data, block, known=is_mapped)
        raw = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=nbytes)
        if start % dtype.itemsize:
            raw = raw.clone()  # foreign files may not be aligned
        return raw.view(dtype).view(shard.sizes)

    def _check(self, name: str, shard: StoredShard, data: memoryview, block: int, *, known: bool = True) -> None:
        """Compare a block with its digest; what is read from the same mapping (``known``) is checked once."""
        key = (shard.file, shard.begin + block * BLOCK)
        if known and key in self._checked:
            return
        part = data[block * BLOCK : (block + 1) * BLOCK]
        self.bytes_read += len(part)
        if self._verify and not self._is_sound(part, shard, block):
            raise CheckpointError(
                f"{self.path / shard.file}: {name!r} is damaged: bytes {key[1]} to {key[1] + len(part)} do not have "
                f"the checksum that the index gives; restore the file or use another checkpoint"
            )
        if known:
            self._checked.add(key)

    def _is_sound(self, part: memoryview, shard: StoredShard, block: int) -> bool:
        if self._quick_of is not None and shard.quick:
            return self._quick_of(part) == shard.quick[block]
        return digest(part) == shard.sums[block]

    def _check_place(self, name: str, shard: StoredShard, nbytes: int) -> None:
        path, wanted = self.path / shard.file, self._index.files.get(shard.file)
        try:
            found = self._size_of(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; {name!r} needs it") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {name!r} needs it") from error
        if found != wanted:
            raise CheckpointError(f"{path} is torn: it has {found} bytes, the index says {wanted}; {name!r} needs it")
        if shard.begin < 0 or shard.begin + nbytes > found or len(shard.sums) != -(-nbytes // BLOCK):
            raise CheckpointError(f"{path}: {name!r} does not lie inside the file; the index is wrong")

    def _size_of(self, path: Place) -> int:
        if isinstance(path, Path):
            return path.stat().st_size
        if path.name not in self._sizes:  # one question per object
            self._sizes[path.name] = path.size()
        return self._sizes[path.name]

    def _fetch(self, name: str, shard: StoredShard, nbytes: int, blocks: list[range]) -> mmap.mmap:
        """Fetch blocks of a shard from a bucket; the memory of the others is never touched."""
        path = self.path / shard.file
        assert isinstance(path, RemotePath), "files of this machine are mapped"
        memory = mmap.mmap(-1, nbytes)
        data = memoryview(memory)
        with self._told(name, path):
            for begin, end in joined(blocks):
                path.read_into(shard.begin + begin * BLOCK, data[begin * BLOCK : min(nbytes, end * BLOCK)])
        return memory

    def _map_file(self, name: str, file: str) -> mmap.mmap:
        if file not in self._maps:
            with self._opened(name, file) as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    @contextmanager
    def _opened(self, name: str, file: str) -> Iterator[io.FileIO]:
        path = self.path / file
        assert isinstance(path, Path), "objects of a bucket are read by ranges"
        with self._told(name, path), open(path, "rb", buffering=0) as opened:
            yield opened

    @contextmanager
    def _told(self, name: str, path: Place) -> Iterator[None]:
        """What the disk or the bucket says of a file is an error of the checkpoint."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {name!r} needs it") from error


class Readable(Protocol):
    """Named tensors on a disk, any box of which can be read, whoever wrote them."""

    path: Place
    bytes_read: int

    def names(self) -> list[str]: ...

    def size(self, name: str) -> torch.Size: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def fill(self, name: str, out: Tensor, box: Box) -> None: ...


def read_into(saved: Readable, name: str, target: Tensor) -> None:
    """Fill a ShardedTensor, a DTensor or a plain tensor; each rank reads what it holds."""
    size = saved.size(name)
    if tuple(target.shape) != tuple(size):
        raise ValueError(f"{name!r} has size {tuple(size)} in {saved.path}, the target {tuple(target.shape)}")
    with torch.no_grad():
        for held in held_by(target):
            saved.fill(name, held.tensor, Box(held.offsets, held.sizes))


def held_by(target: Tensor) -> list[HeldBox]:
    """Return what this rank holds of a tensor of any kind, to be filled."""
    if isinstance(target, (DTensor, ShardedTensor)):
        return target._held_boxes("load")
    return [HeldBox((0,) * target.dim(), tuple(target.shape), target.detach())]


def joined(ranges: list[range]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of ranges that come in order, those that touch as one.

    >>> list(joined([range(0, 2), range(1, 3), range(3, 4), range(6, 7)]))
    [(0, 4), (6, 7)]
    """
    begin = end = 0
    for one in ranges:
        if one.start > end:
            if end > begin:
                yield begin, end
            begin = one.start
        end = max(end, one.stop)
    if end > begin:
        yield begin, end


def runs(inner: Box, stored: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of ``inner`` in a row-major array that is ``stored``; one wide range if very many."""
    starts = [begin - first for begin, first in zip(inner.offsets, stored.offsets, strict=True)]
    strides = [prod(stored.sizes[dim + 1 :]) for dim in range(len(stored.sizes))]
    dim = len(stored.sizes)
    while dim > 0 and inner.sizes[dim - 1] == stored.sizes[dim - 1]:
        dim -= 1
    # Dims from ``dim`` on are complete: one run spans inner.sizes[dim - 1] steps of the dim before.
    outer = max(dim - 1, 0)
    length = (inner.sizes[outer] * strides[outer] if inner.sizes else 1) * itemsize
    base = sum(start * stride for start, stride in zip(starts, strides, strict=True)) * itemsize
    if prod(inner.sizes[:outer]) > _MANY_RUNS:
        last = sum((size - 1) * stride for size, stride in zip(inner.sizes, strides, strict=True)) * itemsize
        yield base, base + last + itemsize
        return
    for position in product(*(range(size) for size in inner.sizes[:outer])):
        begin = base + sum(at * stride for at, stride in zip(position, strides, strict=False)) * itemsize
        yield begin, begin + length
