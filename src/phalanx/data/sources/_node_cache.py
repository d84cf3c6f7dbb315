"""Keeps copies of shards on this node, made once for all of its processes, and never more than a bound.

Guarantees: at no time more than ``max_shards`` copies, counting those being made (or one for each process that makes
one, if those are more). A copy appears complete or not at all (it is made under another name and renamed). No two
processes make the same one. Copies that nobody reads now or next go first, the oldest before; a copy that is open
somewhere can be read to its end even when it was removed.

Assumptions: the directory is on a local disk (locks are ``flock``), and belongs to one user. A process that dies
gives up what it said it needs: its lock goes with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_COPY, _DRAFT = ".copy", ".making"
#: Copies share this many locks; two that meet in one are made one after the other.
_NUM_LOCKS = 256


class NodeCache:
    """Copies of shards in ``directory``, at most ``max_shards``; left out: as many as the job's windows need.

    >>> cache = NodeCache("/local/cache", max_shards=256)                                   # doctest: +SKIP
    >>> TarSource(paths, cache=cache, fetch=download)                                       # doctest: +SKIP
    """

    _note: tuple[int, Path, int] | None = None
    """The process that said what it needs, and the file that it said it in, with its number."""

    def __init__(self, directory: str | Path, max_shards: int | None = None) -> None:
        if max_shards is not None and max_shards < 1:
            raise ValueError(f"max_shards is {max_shards}; expected at least 1")
        self.directory = Path(directory)
        self.max_shards = max_shards
        self.needed = 0
        """How many copies are read now or next, as far as samplers have said."""

    @property
    def bound(self) -> int:
        """How many copies there are at most."""
        return self.max_shards if self.max_shards is not None else max(self.needed, 1)

    def adjust(self, needed: int) -> None:
        """Take note how many shards are read now or next; refuse if fewer may be kept."""
        if self.max_shards is not None and self.max_shards < needed:
            raise ValueError(
                f"the node's cache may keep {self.max_shards} shards, but lanes x 2 x window = {needed} are read now "
                f"or next: it would fetch the same ones over and over. Give max_shards={needed} or more, or fewer "
                "lanes, or a smaller window"
            )
        self.needed = max(self.needed, needed)

    def open(self, key: str, make: Callable[[Path], None]) -> BinaryIO:
        """Return the copy ``key``, open for reading; ``make(path)`` writes it if there is none."""
        while True:
            try:
                return self._path(key).open("rb")
            except FileNotFoundError:
                self.bring(key, make)  # and once more: another process may need its place at once

    def bring(self, key: str, make: Callable[[Path], None]) -> None:
        """Have the copy ``key`` there; the first process makes it, others wait for that."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._locked(f"{zlib.crc32(key.encode()) % _NUM_LOCKS}.lock"):
            if self._path(key).exists():
                return
            draft = self.directory / f"{key}{_DRAFT}"
            with self._locked("cache.lock"):
                draft.unlink(missing_ok=True)  # of a process that died: nobody else has this key's lock
                self._make_room(key)
                draft.touch()
            try:
                make(draft)
                os.replace(draft, self._path(key))
            finally:
                draft.unlink(missing_ok=True)

    def need(self, now: Iterable[str], later: Iterable[str]) -> None:
        """Say which copies this process reads now, and which it will read next; replaces what it said before."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._note is None or self._note[0] != os.getpid():
            path = self.directory / f"{os.getpid()}-{os.urandom(4).hex()}.need"
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)  # held as long as the process lives
            self._note = os.getpid(), path, handle
        text = json.dumps({"now": list(now), "later": list(later)}).encode()
        with self._locked("cache.lock"):
            os.ftruncate(self._note[2], 0)
            os.pwrite(self._note[2], text, 0)

    def keys(self) -> list[str]:
        """Return the copies that are there."""
        return sorted(path.name.removesuffix(_COPY) for path in self.directory.glob(f"*{_COPY}"))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_COPY}"

    def _make_room(self, key: str) -> None:
        """Remove copies until one more fits; with the cache's lock."""
        copies = list(self.directory.glob(f"*{_COPY}"))
        drafts = len(list(self.directory.glob(f"*{_DRAFT}")))
        surplus = len(copies) + drafts + 1 - self.bound
        if surplus <= 0:
            return
        now, later = self._needs()
        oldest = sorted(copies, key=lambda path: path.stat().st_mtime_ns)
        names = [path.name.removesuffix(_COPY) for path in oldest]
        # First what nobody needs, then what is only needed later, last what others have open and can read to its end.
        order = sorted(names, key=lambda name: 2 if name in now else 1 if name in later else 0)
        for name in order[:surplus]:
            self._path(name).unlink(missing_ok=True)

    def _needs(self) -> tuple[set[str], set[str]]:
        now: set[str] = set()
        later: set[str] = set()
        for path in self.directory.glob("*.need"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if self._note is None or path != self._note[1]:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        pass  # its process lives
                    else:
                        path.unlink(missing_ok=True)
                        continue
                said = json.loads(file.read() or b"{}")
                now.update(said.get("now", ()))
                later.update(said.get("later", ()))
        return now, later

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.directory / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_note": None}

    def __del__(self) -> None:
        if self._note is not None:
            pid, path, handle = self._note
            if pid == os.getpid():
                path.unlink(missing_ok=True)
            os.close(handle)
