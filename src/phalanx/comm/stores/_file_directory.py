"""Reads and writes the files of a FileStore: one per key, one per lease, a lock, a clock and a change counter.

Guarantees: a reader sees a whole value or none (files appear by rename); writers exclude each other by
``flock``, which the kernel gives back when its holder dies, and every write is one rename, so a writer
killed at any moment leaves the old state or the new one. Leases are files whose modification time is the
heartbeat, judged against a file touched at that moment on the same file system: one clock, whatever host
asks, also for a reader that arrives late. Assumptions: that clock does not jump; on NFS, version 4
(``flock`` across hosts) and a mount that gives errors rather than hang (``soft``). Nothing is synced to
disk: a job does not outlive its host's page cache.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from phalanx.comm.stores._complaints import Complaints, clipped
from phalanx.comm.stores._stored_value import ABSENT, StoredValue, Writer, decode
from phalanx.errors import StoreLost

log = logging.getLogger(__name__)

_CHANCE = random.SystemRandom()  # not the global generator: that one belongs to the training script

STALE = 60.0
"""Seconds after which a temporary file is taken for that of a dead writer."""

_LONGEST_NAME = 240
_LONGEST_LEASE = 7 * 24 * 3600.0


def _key_of(name: str) -> str | None:
    """Return the key that a file is named after; None for names that no client gives."""
    try:
        key = unquote(name[1:], errors="strict")
        return key if "k" + quote(key, safe="") == name else None
    except UnicodeError:
        return None


class Directory:
    """One client's access to the files under ``root``."""

    def __init__(self, root: Path, timeout: float) -> None:
        self.root = root
        self.timeout = timeout
        self.closed = False
        self.address = f"file://{quote(str(root))}"
        self._writer = Writer()
        self._complaints = Complaints(log)
        self._keys, self._leases, self._temporary = (root / name for name in ("keys", "leases", "tmp"))
        with self.reporting_loss():
            for folder in (self._keys, self._leases, self._temporary):
                folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale_files()

    @contextmanager
    def reporting_loss(self) -> Iterator[None]:
        if self.closed:
            raise StoreLost(f"store {self.address} was closed by this client", address=self.address)
        try:
            yield
        except OSError as error:
            if isinstance(error, StoreLost):
                raise
            raise StoreLost(f"lost the store {self.address}: {error}", address=self.address) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other writer, in this process and elsewhere; ``StoreLost`` if that takes too long."""
        import fcntl  # not on every platform; reading works without

        with self.reporting_loss():
            number = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                deadline = time.monotonic() + self.timeout
                while True:
                    try:
                        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except OSError as error:
                        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                            raise
                        if time.monotonic() >= deadline:
                            message = f"{self.address}: another process held the lock for {self.timeout:g} s"
                            raise StoreLost(message, address=self.address) from error
                    time.sleep(_CHANCE.uniform(0.0001, 0.001))
                yield
            finally:
                os.close(number)  # gives the lock back

    def _path(self, key: str) -> Path:
        name = quote(key, safe="")
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"key too long for {self.address}: {len(name)} of {_LONGEST_NAME} characters: {key!r}")
        return self._keys / f"k{name}"

    def read(self, key: str) -> StoredValue:
        try:
            return decode(self._path(key).read_bytes())
        except IsADirectoryError:
            self._complaints.say(key, f"{self.address}: {key!r} is a directory, which no client made; ignored")
            return ABSENT
        except FileNotFoundError:
            if not self._keys.is_dir():
                raise
            return ABSENT

    def records(self, prefix: str) -> dict[str, StoredValue]:
        """Return the live entries under ``prefix``, in the order of the keys."""
        with self.reporting_loss():
            start = "k" + quote(prefix, safe="")
            names = [name for name in os.listdir(self._keys) if name.startswith(start)]
            ended: dict[int, bool] = {}
            keys = sorted(key for name in names if (key := _key_of(name)) is not None)
            return {key: record for key in keys if (record := self.live(self.read(key), ended)) is not ABSENT}

    def write(self, key: str, value: bytes, lease: int | None = None) -> None:
        self._replace(self._path(key), self._writer.encode(value, lease))
        self._tick()

    def remove(self, key: str) -> None:
        self._path(key).unlink()
        self._tick()

    def _replace(self, path: Path, content: bytes) -> None:
        temporary = self._temporary / f"{os.getpid()}.{_CHANCE.getrandbits(64):x}"
        temporary.write_bytes(content)
        try:
            os.replace(temporary, path)
        except IsADirectoryError:  # a stranger's: out of the way with it
            path.rename(self._temporary / f"stranger.{_CHANCE.getrandbits(64):x}")
            os.replace(temporary, path)

    def _tick(self) -> None:
        """Write one byte more, which tells watches that something changed. With the lock held."""
        with open(self.root / "ticks", "ab") as file:
            file.write(b".")

    def ticks(self) -> bytes:
        """Opened rather than asked by name: NFS looks at the server then, not at its cache."""
        with self.reporting_loss():
            try:
                with open(self.root / "ticks", "rb") as file:
                    return b"%d" % os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                if not self._keys.is_dir():
                    raise
                return b"0"

    def _now(self) -> float:
        """Return the file system's own time."""
        clock = self.root / "clock"
        clock.touch()
        os.utime(clock)
        return clock.stat().st_mtime

    def start_lease(self, lease: int, ttl: float) -> None:
        self._replace(self._leases / str(lease), repr(float(ttl)).encode())

    def beat(self, lease: int) -> None:
        os.utime(self._leases / str(lease))

    def has_ended(self, lease: int) -> bool:
        """Once True, always True: a heartbeat asks first, with the lock held."""
        path = self._leases / str(lease)
        try:
            ttl, beat = self._ttl(path), path.stat().st_mtime
            # The second look catches a heartbeat between the first one and the clock.
            return self._now() >= beat + ttl and path.stat().st_mtime == beat
        except FileNotFoundError:
            return True

    def _ttl(self, path: Path) -> float:
        content = path.read_bytes()
        try:
            ttl = float(content)
        except ValueError:
            ttl = -1.0
        if not 0 < ttl <= _LONGEST_LEASE:
            what = f"{self.address}: lease {path.name} holds {clipped(content)}, no time; it has ended"
            self._complaints.say(path.name, what)
            return 0.0
        return ttl

    def live(self, record: StoredValue, ended: dict[int, bool]) -> StoredValue:
        """Return the record, or ABSENT if its lease has run out. ``ended`` remembers answers within one call."""
        if record.lease is None:
            return record
        if record.lease not in ended:
            ended[record.lease] = self.has_ended(record.lease)
        return ABSENT if ended[record.lease] else record

    def remove_ended_leases(self) -> None:
        """Tidy up; readers ignore what is removed here already. With the lock held."""
        names = [name for name in os.listdir(self._leases) if name.isdecimal() and name.isascii()]
        self.remove_leases({int(name) for name in names if self.has_ended(int(name))})

    def remove_leases(self, leases: set[int]) -> None:
        """Remove leases and the keys bound to them. With the lock held."""
        if not leases:
            return
        for lease in leases:
            (self._leases / str(lease)).unlink(missing_ok=True)
        for path in self._keys.iterdir():
            if path.is_file() and decode(path.read_bytes()).lease in leases:
                path.unlink()
        self._tick()

    def _remove_stale_files(self) -> None:
        now = self._now()
        for path in self._temporary.iterdir():
            try:
                if path.stat().st_mtime < now - STALE:
                    path.unlink()
            except FileNotFoundError:
                continue  # its writer finished just now
            except (IsADirectoryError, PermissionError):
                continue  # a stranger's
