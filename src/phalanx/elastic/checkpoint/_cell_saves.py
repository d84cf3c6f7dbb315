"""Writes one save by several workers, each the ranges of tensors that it owns; and agrees on one to resume from.

Phases: 1. every worker writes its tensor file into a folder that all of them name alike, and then, durably, what it
holds (a record beside it); 2. worker 0 waits for all records, checks that together they are all tensors of the state,
writes the manifest and gives the folder its name as a save. No collective is used, only the disk, which all workers
share: a training step never waits, and a worker that dies leaves a folder without a manifest, which nobody reads and a
later save removes. An unsharded save is the case of one worker that has everything.

Guarantee: a folder with a save's name has all files of all workers. Limit: workers that do not see each other's files
(no disk in common) cannot save together; worker 0 says whose files it misses.
"""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.elastic.checkpoint._save_folder import PARTIAL, SHARED, Known, publish, remove_leftovers, save_names
from phalanx.elastic.checkpoint._save_memory import Staging
from phalanx.elastic.checkpoint._saves import (
    Manifest,
    SaveError,
    check_save,
    read_manifest,
    read_sealed,
    sync,
    write_manifest,
    write_sealed,
)
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._state_codec import Json, copy_encoded
from phalanx.elastic.checkpoint._tensor_files import SUFFIX, FileRecord, TensorRange, check_tiles, write_tensor_file
from phalanx.elastic.checkpoint._tensor_names import tensor_names
from phalanx.storage import Place

PATIENCE = 120.0
"""Seconds that worker 0 waits for the files of the others, from the time its own is written."""
RECORD = ".json"

Exchange = Callable[[Any], list[Any]]
"""Gives every worker what all of them gave, by rank: ``Group.all_gather_values``."""


@dataclass(frozen=True, kw_only=True)
class CellSnapshot:
    """What worker ``number`` of ``count`` writes of a save: copies that nobody else touches.

    ``key`` is the same on all workers and tells this attempt at the step from every other: generation and round, say.
    """

    step: int
    number: int
    count: int
    key: str
    ranges: tuple[TensorRange, ...]
    tree: Json
    tensors: tuple[Tensor, ...]
    """Of the tree; on the meta device where all workers' ranges have the values."""

    @classmethod
    def take(
        cls,
        step: int,
        state: State,
        ranges: Iterable[TensorRange],
        *,
        number: int,
        count: int,
        key: str,
        staging: Staging | None = None,
    ) -> CellSnapshot:
        """Copy what this worker writes. Small tensors of the state are worker 0's to write."""
        tree, tensors = copy_encoded(state) if number == 0 else ({}, [])
        ranges = list(ranges)
        values = (staging or Staging()).copy([one.values for one in ranges])
        copies = tuple(replace(one, values=value) for one, value in zip(ranges, values, strict=True))
        return cls(step=step, number=number, count=count, key=key, ranges=copies, tree=tree, tensors=tuple(tensors))

    @property
    def names(self) -> list[str]:
        return tensor_names(self.tree, len(self.tensors))

    def file_of(self, number: int, *, has_key: bool = False) -> str:
        """Return the name of a worker's file; with its key where files of several attempts lie together."""
        key = "-" + re.sub(r"\W", "_", self.key) if has_key else ""
        return f"tensors-{number + 1:05d}-of-{self.count:05d}{key}{SUFFIX}"


def write_cells(
    directory: Path,
    snapshot: CellSnapshot,
    *,
    keep: int,
    secret: bytes = b"",
    known: Known | None = None,
    clean_since: int | None = None,
    is_unwanted: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE,
    verify: bool = False,
) -> Path | None:
    """Write this worker's file; worker 0 also waits for the others' and makes the save, which it returns.

    ``verify``: each reads its own back from the disk before it says that it is there.

    None on the other workers, and when ``is_unwanted`` says that nobody waits for this save any more. ``OSError`` when
    the disk does not take it, or (``TimeoutError``) when files of others do not come.
    """
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory / f"{PARTIAL}{snapshot.step}{SHARED}{snapshot.key}"
    if snapshot.number != 0:
        _write_own_unless_given_up(folder, snapshot, secret, verify)
        return None
    remove_leftovers(directory, folder)
    if not _is_complete(folder, secret):
        folder.mkdir(exist_ok=True)
        _write_own(folder, snapshot, secret, verify)
        records = wait_for_records(
            folder,
            snapshot,
            secret,
            has_key=False,
            list_names=lambda: [path.name for path in folder.glob("*")],
            is_unwanted=is_unwanted,
            patience=patience,
            longest_pause=0.5,
            otherwise="the directory is not on a disk that all workers share",
        )
        if records is None:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        _complete(folder, snapshot, records, secret, verify)
    return publish(folder, snapshot.step, keep=keep, secret=secret, known=known, clean_since=clean_since)


def _is_complete(folder: Path, secret: bytes) -> bool:
    """Return whether an earlier attempt came as far as the manifest."""
    try:
        read_manifest(folder, secret)
    except SaveError:
        return False
    return True


def _complete(folder: Path, snapshot: CellSnapshot, records: list[FileRecord], secret: bytes, verify: bool) -> None:
    check_records(records, snapshot)
    write_manifest(folder, snapshot.step, snapshot.tree, snapshot.names, records, secret, verify=verify)
    for number in range(snapshot.count):
        (folder / (snapshot.file_of(number) + RECORD)).unlink()


def check_records(records: list[FileRecord], snapshot: CellSnapshot) -> None:
    """Refuse files that are not the state together."""
    if problem := check_tiles(records, snapshot.names):
        raise ValueError(f"the workers' ranges of step {snapshot.step} are no state: {problem}")


def late_files(names: Sequence[str], there: Collection[str]) -> list[int]:
    """Return the numbers of the workers whose files are not there.

    >>> late_files(["a", "b", "c"], {"b"})
    [0, 2]
    """
    return [number for number, name in enumerate(names) if name not in there]


def _write_own_unless_given_up(folder: Path, snapshot: CellSnapshot, secret: bytes, verify: bool) -> None:
    folder.mkdir(exist_ok=True)
    try:
        _write_own(folder, snapshot, secret, verify)
    except FileNotFoundError:
        if folder.exists():
            raise
        # Worker 0 has removed it: it does not want this save any more.


def _write_own(folder: Path, snapshot: CellSnapshot, secret: bytes, verify: bool) -> None:
    file = folder / snapshot.file_of(snapshot.number)
    record = write_tensor_file(file, own_ranges(snapshot), verify=verify)
    sync(file)
    begun = folder / f".{file.name}{RECORD}"
    write_sealed(begun, {**record.to_json(), "step": snapshot.step}, secret)
    begun.rename(folder / (file.name + RECORD))
    sync(folder)


def own_ranges(snapshot: CellSnapshot) -> list[TensorRange]:
    """Return what a worker writes: its ranges, and on worker 0 the small tensors of the state."""
    small = [
        TensorRange.of(name, tensor)
        for name, tensor in zip(snapshot.names, snapshot.tensors, strict=True)
        if tensor.device != torch.device("meta")
    ]
    return [*snapshot.ranges, *small]


def wait_for_records(
    place: Place,
    snapshot: CellSnapshot,
    secret: bytes,
    *,
    has_key: bool,
    list_names: Callable[[], Collection[str]],
    is_unwanted: Callable[[], bool],
    patience: float,
    longest_pause: float,
    otherwise: str,
) -> list[FileRecord] | None:
    """Return what the files of all workers hold, once they are in ``place``; None when the save is not wanted any more.

    ``list_names`` is asked what is there, with growing pauses; ``has_key`` is as for ``file_of``; ``otherwise`` is the
    other reason why files do not come.
    """
    names = [snapshot.file_of(number, has_key=has_key) + RECORD for number in range(snapshot.count)]
    end, pause = time.monotonic() + patience, 0.01
    while missing := late_files(names, list_names()):
        if is_unwanted():
            return None
        if time.monotonic() > end:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"the files of workers {missing} of {snapshot.count} are not in {place} after {patience:g} s: these "
                f"workers are lost or slow, or {otherwise}",
            )
        time.sleep(pause)
        pause = min(longest_pause, 1.5 * pause)
    try:
        return [read_record(place / name, snapshot.step, secret) for name in names]
    except SaveError as error:  # what was just written is not there: the disk's fault, and it is tried again
        raise OSError(errno.EIO, str(error)) from error


def read_record(path: Place, step: int, secret: bytes) -> FileRecord:
    """Return what a worker says that its file holds; ``SaveError`` for anything else."""
    what = f"{path}: the record of a worker's file"
    fields = read_sealed(path, what, secret)
    if fields.integer("step") != step:
        raise SaveError(f"{what} is of step {fields.get('step')}; expected {step}")
    names = ("file", "checksum", "ranges")
    return FileRecord.from_json({name: fields.get(name) for name in names}, what, SaveError)


def agree_on_save(
    directory: Place, secret: bytes, rank: int, size: int, exchange: Exchange
) -> tuple[Manifest | None, list[str]]:
    """Return the newest save that is readable, and what was wrong with newer ones; all workers find the same.

    Every worker looks at the bytes of its share of the files, so all of them together read a save once.
    """
    problems: list[str] = []
    try:
        names = save_names(directory)
    except SaveError as error:
        names, problems = [], [str(error)]
    told = exchange([names, problems])
    names = list(dict.fromkeys(name for each, _ in told for name in each))
    problems = [problem for _, each in told for problem in each]
    for name in sorted(names, reverse=True):
        found: Manifest | None = None
        problem = ""
        try:
            found = check_save(directory / name, secret, share=(rank, size))
        except SaveError as error:
            problem = str(error)
        bad = [text for text in exchange(problem) if text]
        if not bad:
            return found, problems
        problems += bad[:1]
    return None, problems
