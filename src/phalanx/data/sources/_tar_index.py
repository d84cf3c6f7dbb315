"""Indexes tar files: which members make a sample, and where they lie. Made once, by all ranks together.

Owns the grouping of members to samples (that of the WebDataset format: the name up to the first dot after the last
slash is the key, the rest, in lower case, the field; neighbours with the same key are one sample) and the file that an
index is kept in.

An index is written under another name and renamed, so that it is there complete or not at all. Ranks that come at the
same time share the work: each takes the next file that nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data._permutation import Indices
from phalanx.data.sources._shard_files import ShardFiles, fingerprint
from phalanx.data.sources._tar_headers import TarMember, members

FORMAT = 1
_ARRAYS = {"starts": np.int64, "kinds": np.int32, "offsets": np.int64, "lengths": np.int64}
_KEY_AND_FIELD = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
_METADATA = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, kw_only=True)
class TarIndex:
    """The samples of one tar file: sample i has the fields [starts[i], starts[i + 1])."""

    keys: list[str]
    starts: Indices
    fields: list[str]
    """The different names of fields; ``kinds`` points in here."""
    kinds: npt.NDArray[np.int32]
    offsets: Indices
    lengths: Indices
    word: int
    """What the file is recognized by: names, places, sizes and times of everything in it; not its content."""

    @property
    def size(self) -> int:
        return len(self.keys)


def group(found: Sequence[TarMember], name: str) -> TarIndex:
    """Make samples of members; ``name`` is the file's, for messages.

    >>> group([TarMember("a/1.jpg", 512, 3), TarMember("a/1.CLS", 1536, 1), TarMember("b.jpg", 2560, 3)], "x").keys
    ['a/1', 'b']
    """
    samples: list[tuple[str, dict[str, TarMember]]] = []
    for member in found:
        matched = _KEY_AND_FIELD.match(member.name)
        if matched is None or _METADATA.match(member.name) or _is_metadata(member.name):
            continue
        key, field = matched[1], matched[2].lower()
        if not samples or key != samples[-1][0]:
            samples.append((key, {}))
        if field in samples[-1][1] or field in ("__key__", "__url__"):
            raise ValueError(
                f"{name}: sample {key!r} has two members for field {field!r} ({member.name}); expected one"
            )
        samples[-1][1][field] = member
    # The format's way to take a sample out of a file that is not written anew.
    samples = [sample for sample in samples if not ("__bad__" in sample[1] and sample[1]["__bad__"].size)]
    kept = [(field, member) for _, fields in samples for field, member in fields.items()]
    numbers = {field: number for number, field in enumerate(dict.fromkeys(field for field, _ in kept))}
    about = "\n".join(f"{member.name} {member.offset} {member.size} {member.mtime}" for _, member in kept)
    return TarIndex(
        keys=[key for key, _ in samples],
        starts=np.cumsum([0, *(len(fields) for _, fields in samples)], dtype=np.int64),
        fields=list(numbers),
        kinds=np.array([numbers[field] for field, _ in kept], dtype=np.int32),
        offsets=np.array([member.offset for _, member in kept], dtype=np.int64),
        lengths=np.array([member.size for _, member in kept], dtype=np.int64),
        word=fingerprint(name, about.encode("utf-8", "surrogateescape")),
    )


def _is_metadata(name: str) -> bool:
    return "/" not in name and name.startswith("__") and name.endswith("__")


class IndexFolder:
    """Indexes of tar files, one file each, in one folder."""

    def __init__(self, files: ShardFiles, folder: Path) -> None:
        self.files, self.folder = files, folder

    def read(self, number: int) -> TarIndex:
        """Return the index of a file, made if there is none or if the file was changed since."""
        found = self._load(number)
        if found is None:
            with self._lock(number, wait=True):
                found = self._load(number) or self._make(number)
        return found

    def summary(self) -> tuple[Indices, npt.NDArray[np.uint64]]:
        """Return samples and fingerprint of every file, from indexes that are there or are made now."""
        known = self._read_summary()
        if known is not None:
            return known
        self._make_missing()
        indexes = [self.read(number) for number in range(len(self.files))]  # waits for those that others make
        sizes = np.array([index.size for index in indexes], dtype=np.int64)
        words = np.array([index.word for index in indexes], dtype=np.uint64)
        text = json.dumps(
            {"format": FORMAT, "stamps": self._stamps(), "sizes": sizes.tolist(), "words": words.tolist()}
        )
        self._write(self._summary_path(), text.encode())
        return sizes, words

    def _make_missing(self) -> None:
        """Make indexes as long as there is one that nobody else is making."""
        count = len(self.files)
        first = os.getpid() % count  # ranks begin in different places
        for number in [*range(first, count), *range(first)]:
            if self._load(number) is None:
                with self._lock(number, wait=False) as is_mine:
                    if is_mine and self._load(number) is None:
                        self._make(number)

    def _make(self, number: int) -> TarIndex:
        name, stamp = self.files.name_of(number), self._stamp(number)
        with self.files.open(number) as file:
            index = group(members(file, name), name)
        arrays = {name: getattr(index, name).tolist() for name in _ARRAYS}
        about = {"keys": index.keys, "fields": index.fields, "word": index.word, **arrays}
        text = json.dumps({"format": FORMAT, "stamp": stamp, "index": about})
        self._write(self._path(number), zlib.compress(text.encode(), 1))
        return index

    def _load(self, number: int) -> TarIndex | None:
        try:
            said = json.loads(zlib.decompress(self._path(number).read_bytes()))
            if said["format"] != FORMAT or said["stamp"] != self._stamp(number):
                return None
            index: dict[str, Any] = said["index"]
            return TarIndex(**index | {name: np.array(index[name], dtype) for name, dtype in _ARRAYS.items()})
        except (FileNotFoundError, ValueError, KeyError, TypeError, zlib.error):
            return None  # none, or a damaged one: it is made anew

    def _stamp(self, number: int) -> list[int | str]:
        """Return by what a changed file is noticed without reading it."""
        path = self.files.paths[number]
        if self.files.fetch is not None:
            return [path]
        found = os.stat(path)
        return [found.st_size, found.st_mtime_ns]

    def _stamps(self) -> list[list[int | str]]:
        return [[self.files.name_of(number), *self._stamp(number)] for number in range(len(self.files))]

    def _read_summary(self) -> tuple[Indices, npt.NDArray[np.uint64]] | None:
        try:
            said = json.loads(self._summary_path().read_bytes())
            if said["format"] == FORMAT and said["stamps"] == self._stamps():
                return np.array(said["sizes"], np.int64), np.array(said["words"], np.uint64)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return None

    def _summary_path(self) -> Path:
        names = fingerprint(*self.files.paths)
        return self.folder / f"summary-{names:016x}.json"

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.files.key_of(number)}.index"

    def _write(self, path: Path, text: bytes) -> None:
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        draft.write_bytes(text)
        os.replace(draft, path)

    @contextlib.contextmanager
    def _lock(self, number: int, *, wait: bool) -> Iterator[bool]:
        with (self.folder / f"{number % 64}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
