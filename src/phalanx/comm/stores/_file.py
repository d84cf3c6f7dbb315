"""Keeps a store in a directory that all processes can reach.

Owns the meaning of the operations; the files themselves, the lock and the clock are in ``_file_directory``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.comm.stores._counter import counter_value
from phalanx.comm.stores._file_directory import Directory
from phalanx.comm.stores._interface import Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.comm.stores._polling import PollingWatch, wait_for_keys
from phalanx.comm.stores._stored_value import ABSENT, decode
from phalanx.errors import StoreError

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore  # torch.distributed's, with its stub


class FileStore(Store):
    """A store in ``directory`` (made if absent), shared by all that can write there.

    >>> FileStore("/shared/job7").add("joined")        # doctest: +SKIP
    1
    """

    def __init__(self, directory: str | os.PathLike[str], *, timeout: float = 30.0) -> None:
        """``timeout``: seconds to wait for the writers' lock before the store counts as lost."""
        self._files = Directory(Path(directory).absolute(), timeout)
        self.address = self._files.address

    def get(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._files.reporting_loss():
            ended: dict[int, bool] = {}
            return [self._files.live(self._files.read(key), ended).value for key in keys]

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        with self._files.locked():
            if lease is None:
                self._files.write(key, value)
                return
            if not isinstance(lease, FileLease) or lease.address != self.address:
                raise TypeError(f"the lease of {key!r} was not made by the store {self.address}")
            if self._files.has_ended(lease.id):
                raise StoreError(f"cannot set {key!r} in {self.address}: its lease has run out")
            self._files.write(key, value, lease.id)

    def add(self, key: str, amount: int = 1) -> int:
        with self._files.locked():
            now = self._files.live(self._files.read(key), {}).value
            total = counter_value(key, now, self.address) + amount
            self._files.write(key, b"%d" % total)
            return total

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        with self._files.locked():
            if self._files.live(self._files.read(key), {}).value != expected:
                return False
            self._files.write(key, value)
            return True

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        return wait_for_keys(self.get_many, keys, timeout, self.address)

    def delete(self, key: str) -> bool:
        with self._files.locked():
            record = self._files.read(key)
            if record is ABSENT:
                return False
            self._files.remove(key)
            return self._files.live(record, {}) is not ABSENT

    def items(self, prefix: str = "") -> dict[str, bytes]:
        values = {key: record.value for key, record in self._files.records(prefix).items()}
        return {key: value for key, value in values.items() if value is not None}

    def watch(self, prefix: str = "") -> Watch:
        return _FileWatch(self.clone()._files, prefix)

    def lease(self, ttl: float) -> Lease:
        if ttl <= 0:
            raise ValueError(f"a lease needs a positive time-to-live, got {ttl}")
        number = random.SystemRandom().randrange(1, 2**63)
        with self._files.locked():
            self._files.remove_ended_leases()
            self._files.start_lease(number, ttl)
        return FileLease(self._files, number, ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> FileStore:
        return FileStore(self._files.root, timeout=self._files.timeout)

    def as_c10d(self, prefix: str = "") -> C10dStore:
        from phalanx.comm.stores._for_torch import for_torch  # start-up: it imports torch

        return for_torch(FileStore(self._files.root / "c10d", timeout=self._files.timeout), prefix)

    def close(self) -> None:
        self._files.closed = True


class FileLease(Lease):
    """A lease of a ``FileStore``; made by ``lease()``."""

    def __init__(self, files: Directory, number: int, ttl: float) -> None:
        self._files = files
        self.id = number
        self.ttl = ttl
        self.address = files.address

    def refresh(self) -> bool:
        with self._files.locked():
            if self._files.has_ended(self.id):
                return False
            self._files.beat(self.id)
            return True

    def revoke(self) -> None:
        with self._files.locked():
            self._files.remove_leases({self.id})


class _FileWatch(PollingWatch):
    def __init__(self, files: Directory, prefix: str) -> None:
        self._files = files
        self._prefix = prefix
        self.start()

    def _token(self) -> bytes | None:
        return self._files.ticks()

    def _snapshot(self) -> dict[str, bytes]:
        return {key: record.raw or b"" for key, record in self._files.records(self._prefix).items()}

    def _value(self, stamp: bytes) -> bytes:
        return decode(stamp).value or b""

    def close(self) -> None:
        self._files.closed = True
