"""Gives the files of shards: from where they lie, or from copies in the node's cache, fetched or unpacked.

Owns the step from a file's number to an open file. What stands in the file is the sources' matter.
"""

from __future__ import annotations

import abc
import gzip
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.data.shards._shard_source import ShardReader, ShardSource
from phalanx.data.sources._node_cache import NodeCache

#: Writes a file's content to a path on this node.
Fetch = Callable[[str, Path], None]


class ShardFiles:
    """Files by number. With ``fetch``, ``paths`` may be anything that it understands, such as URLs.

    >>> ShardFiles(["a.tar", "b.tar"]).name_of(1)
    'b.tar'
    """

    def __init__(self, paths: Sequence[str | Path], cache: NodeCache | None = None, fetch: Fetch | None = None) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self.cache, self.fetch = cache, fetch
        if not self.paths:
            raise ValueError("no files were given; expected at least one")
        packed = next((path for path in self.paths if is_gzip(path)), None)
        if cache is None and (fetch is not None or packed is not None):
            what = "fetch= brings files to this node" if fetch is not None else f"{packed} must be unpacked to be read"
            raise ValueError(f"{what}; give cache=NodeCache(directory) to keep them in")

    def __len__(self) -> int:
        return len(self.paths)

    def name_of(self, number: int) -> str:
        """Return the file's name without its folder: the same wherever the folder lies."""
        return self.paths[number].rsplit("/", 1)[-1]

    def is_copied(self, number: int) -> bool:
        return self.fetch is not None or is_gzip(self.paths[number])

    def open(self, number: int) -> BinaryIO:
        """Return the file, open for reading, unpacked."""
        if not self.is_copied(number):
            return Path(self.paths[number]).open("rb")
        assert self.cache is not None, "copied files have a cache"
        return self.cache.open(self.key_of(number), lambda path: self._make(number, path))

    def prepare(self, number: int) -> None:
        """Bring a file near: into the node's cache, or into the memory of the kernel."""
        if self.is_copied(number):
            assert self.cache is not None, "copied files have a cache"
            self.cache.bring(self.key_of(number), lambda path: self._make(number, path))
        elif hasattr(os, "posix_fadvise"):  # platform: Linux has it
            with Path(self.paths[number]).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def expect(self, now: Sequence[int], later: Sequence[int]) -> None:
        if self.cache is not None:
            copied = [[self.key_of(n) for n in numbers if self.is_copied(n)] for numbers in (now, later)]
            self.cache.need(*copied)

    def adjust_cache(self, num_shards: int) -> None:
        if self.cache is not None:
            self.cache.adjust(min(num_shards, sum(map(self.is_copied, range(len(self))))))

    def key_of(self, number: int) -> str:
        """Return the name of the file's copy: its own, and a digest of where it comes from."""
        origin = hashlib.blake2b(self.paths[number].encode(), digest_size=8).hexdigest()
        return f"{self.name_of(number)}-{origin}"

    def _make(self, number: int, target: Path) -> None:
        path = self.paths[number]
        if self.fetch is None:
            _unpack(Path(path), target)
        elif is_gzip(path):
            fetched = target.with_name(f"{target.name}.gz")
            try:
                self.fetch(path, fetched)
                _unpack(fetched, target)
            finally:
                fetched.unlink(missing_ok=True)
        else:
            self.fetch(path, target)


class FileSource(ShardSource):
    """A source whose shards lie in files: one each, unless ``file_of`` says otherwise."""

    files: ShardFiles

    def file_of(self, shard: int) -> int:
        """Return the number of the file that a shard lies in."""
        return shard

    def name_of(self, shard: int) -> str:
        return self.files.name_of(self.file_of(shard))

    def prepare(self, shard: int) -> None:
        self.files.prepare(self.file_of(shard))

    def expect(self, shards: Sequence[int], upcoming: Sequence[int]) -> None:
        now, later = (sorted({self.file_of(shard) for shard in each}) for each in (shards, upcoming))
        self.files.expect(now, later)

    def adjust_cache(self, num_shards: int) -> None:
        self.files.adjust_cache(num_shards)


class FileReader(ShardReader):
    """A reader of one file, which it takes over and closes; ``name`` is for messages."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        # A number and no file object: the collector may end a file before the reader that would have closed it.
        self._handle = os.dup(file.fileno())
        file.close()

    def read(self, offsets: Sequence[int]) -> list[Any]:
        return [self.sample(offset) for offset in offsets]

    @abc.abstractmethod
    def sample(self, offset: int) -> Any:
        """Return one sample of the shard."""

    def bytes_at(self, first: int, count: int, what: str) -> bytes:
        """Return a part of the file; ``what`` says of what, should it be cut off."""
        data = os.pread(self._handle, count, first)
        if len(data) != count:
            raise ValueError(
                f"{self.name}: {what} has {len(data)} of {count} bytes; the file was cut off since its index was made"
            )
        return data

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()


def is_gzip(path: str) -> bool:
    return path.endswith((".gz", ".tgz"))


def _unpack(packed: Path, target: Path) -> None:
    with gzip.open(packed, "rb") as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def fingerprint(*parts: str | bytes | int) -> int:
    """Return a 64-bit word that depends on every part."""
    digest = hashlib.blake2b(digest_size=8, person=b"phalanx.shard")
    for part in parts:
        text = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")
