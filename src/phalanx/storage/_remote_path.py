"""Names an object or a folder of a bucket as ``pathlib`` names files, so that readers need not know where bytes lie.

Owns the part of ``Path``'s interface that readers of checkpoints use. A folder exists when objects lie below it. It is
deliberately no ``os.PathLike``: whatever would open it as a file of this machine fails at once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from phalanx.storage._errors import NotStored
from phalanx.storage._object_bucket import AT_ONCE, PART, ObjectBucket


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object or folder by URL.

    >>> place = RemotePath(ObjectBucket("memory", "doctest"), "run")
    >>> (place / "a").write_bytes(b"text")
    >>> (place / "a").read_bytes(), place.is_dir(), [each.name for each in place.iterdir()], str(place / "a")
    (b'text', True, ['a'], 'memory://doctest/run/a')
    """

    bucket: ObjectBucket
    key: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.bucket, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}"

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.bucket, self.key.rpartition("/")[0])

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        try:
            self.size()
        except NotStored:
            return False
        return True

    def is_dir(self) -> bool:
        return next(self.walk(), None) is not None

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what lies in this folder, folders among it, in the order of their names."""
        names = sorted({name.partition("/")[0] for name, _ in self.walk()})
        return (self / name for name in names)

    def walk(self) -> Iterator[tuple[str, int]]:
        """Yield path below this folder and size of every object in it, however deep."""
        start = f"{self.key}/" if self.key else ""
        for key, size in self.bucket.list(self.key):
            if key.startswith(start):
                yield key[len(start) :], size

    def size(self) -> int:
        return self.bucket.size(self.key)

    def read_bytes(self) -> bytes:
        return self.bucket.get(self.key)

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``begin`` on, several ranges at a time."""
        parts = range(0, len(out), PART)

        def fetch(at: int) -> None:
            part = out[at : at + PART]
            part[:] = memoryview(self.bucket.get_range(self.key, begin + at, begin + at + len(part)))

        if len(parts) < 2:
            for at in parts:
                fetch(at)
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(parts))) as pool:
            for _ in pool.map(fetch, parts):
                pass

    def read_range(self, begin: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(begin, memoryview(data))
        return data

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open for reading from the first byte to the last; what is read is fetched ahead, several ranges at a time."""
        if mode != "rb":
            raise ValueError(f"mode is {mode!r}; {self} can be opened for reading bytes only ('rb')")
        return io.BufferedReader(_Ranges(self), AT_ONCE * PART)

    def write_bytes(self, data: bytes) -> None:
        self.bucket.put(self.key, data, size=len(data))

    def create(self, data: bytes) -> bool:
        """Write unless there is something already; whether it was written. One of several writers wins."""
        return self.bucket.put(self.key, data, size=len(data), create=True)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.size()
        self.bucket.delete([self.key])


class _Ranges(io.RawIOBase):
    """An object as a file; the buffer above it asks for large ranges."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._at, self._size = 0, path.size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readall(self) -> bytes:
        data = self._path.read_range(self._at, max(0, self._size - self._at))
        self._at += len(data)
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        out = out[: max(0, min(len(out), self._size - self._at))]
        if len(out):
            self._path.read_into(self._at, out)
        self._at += len(out)
        return len(out)
