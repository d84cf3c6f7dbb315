"""Keeps a job's saves in a bucket, with a folder of this machine as the tier in which they are made and read.

Layout: below the job's URL one folder per save, ``step-000000000120/``, with the files that it has on a disk;
``state.json`` is written last and removed first, so a save is there completely or not at all. ``run-id`` names this
history of saves: the folder of this machine has its name, so that saves of a history that somebody removed from the
bucket never come back from a disk. ``last-good`` is as in ``_save_folder``.

Guarantees: what ``upload`` and ``write_share`` return is in the bucket; the newest save is never removed, nor is the
last good one; what a killed upload left is removed by a later one. A save of a step that is there already stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.elastic.checkpoint._cell_saves import (
    PATIENCE,
    RECORD,
    CellSnapshot,
    check_records,
    own_ranges,
    wait_for_records,
)
from phalanx.elastic.checkpoint._save_folder import GOOD, new_partial, save_names
from phalanx.elastic.checkpoint._saves import (
    STATE,
    Manifest,
    SaveError,
    check_save,
    manifest_body,
    name_of,
    read_manifest,
    sealed,
    step_of,
)
from phalanx.elastic.checkpoint._tensor_files import write_tensor_file
from phalanx.storage import NotStored, RemotePath
from phalanx.storage._transfer import download_folder, remove_folder, upload_file, upload_folder

RUN = "run-id"


class BucketSaves:
    """The saves of one job below a URL; ``local`` is where folders of this machine are made, None: the system's place
    for temporary files."""

    def __init__(self, remote: RemotePath, local: Path | None = None) -> None:
        self.remote = remote
        self.root = local or Path(tempfile.gettempdir()) / f"phalanx-saves-{os.getuid()}"
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of this machine. ``OSError`` while the bucket or the disk is out of reach."""
        if self._folder is None:
            self._make_root()
            folder = self.root / self._run_id()
            folder.mkdir(exist_ok=True)
            self._folder = folder
        return self._folder

    def _make_root(self) -> None:
        """Make the root, for this user alone: what lies there is believed to be ours."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.root.stat().st_uid
        if owner != os.getuid():
            raise PermissionError(
                errno.EPERM,
                f"{self.root}, where saves are made before they go to {self.remote}, belongs to user {owner}, not to "
                f"{os.getuid()}; name a folder of your own with Saves(local=...)",
            )

    def _run_id(self) -> str:
        """Return the name of this history of saves; the first worker that asks makes it."""
        place = self.remote / RUN
        try:
            text = place.read_bytes()
        except NotStored:
            text = secrets.token_hex(8).encode()
            if not place.create(text):
                text = place.read_bytes()
        found = text.decode(errors="replace").strip()
        if not (found.isalnum() and found.isascii() and len(found) <= 64):
            raise OSError(errno.EINVAL, f"{place} holds {found[:64]!r}; expected a name of letters and digits")
        return found

    def names(self) -> list[str]:
        """Return the names of all saves, in the bucket or here only, newest first. ``SaveError`` if out of reach."""
        try:
            found = {*save_names(self.remote), *save_names(self.folder)}
        except OSError as error:
            raise SaveError(str(error)) from error
        return sorted(found, key=lambda name: (step_of(name) or 0, name), reverse=True)

    def find(self, secret: bytes) -> tuple[Manifest | None, list[str]]:
        """Return what the newest readable save holds, and what was wrong with newer ones; as ``find_save``.

        A copy on this machine that is damaged is fetched again before its save counts as unreadable.
        """
        problems: list[str] = []
        try:
            names = self.names()
        except SaveError as error:
            return None, [str(error)]
        for name in names:
            for again in (False, True):
                try:
                    return check_save(self.bring(name, again=again), secret), problems
                except (SaveError, OSError) as error:
                    problem = str(error)
            problems.append(problem)
        return None, problems

    def bring(self, name: str, *, again: bool = False) -> Path:
        """Return a save as a folder of this machine; the workers of a machine fetch it once.

        With ``again`` the copy that is here is not good enough. ``OSError`` when it cannot be had.
        """
        path = self.folder / name
        with self._locked():
            if path.is_dir() and not (again and (self.remote / name / STATE).is_file()):
                return path
            partial = new_partial(self.folder, step_of(name) or 0)
            try:
                partial.mkdir()
                download_folder(self.remote / name, partial)
                if path.exists():
                    path.rename(new_partial(self.folder, step_of(name) or 0))  # a later save removes it
                partial.rename(path)
            except BaseException:
                _remove_tree(partial)
                raise
        return path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def good_save(self) -> str:
        """Return the name of the last good save; empty if none is known."""
        try:
            text = (self.remote / GOOD).read_bytes().decode(errors="replace").strip()
        except NotStored:
            return ""
        return text if step_of(text) is not None and (self.remote / text / STATE).is_file() else ""

    def upload(self, folder: Path, *, keep: int, clean_since: int | None = None) -> RemotePath | None:
        """Have a save of this machine in the bucket; None if it is gone here, since a newer one came."""
        target = self.remote / folder.name
        if not (target / STATE).is_file():
            try:
                names = [record.file for record in read_manifest(folder).files]
                upload_folder(folder, target, STATE, names=names)
            except (SaveError, FileNotFoundError) as error:
                if not (folder / STATE).exists():
                    return None
                raise OSError(errno.EIO, f"{folder} cannot be uploaded: {error}") from error
        step = step_of(folder.name)
        assert step is not None, "only saves are uploaded"
        self._settle(step, keep, clean_since)
        return target

    def write_share(
        self,
        snapshot: CellSnapshot,
        *,
        keep: int,
        secret: bytes,
        clean_since: int | None = None,
        is_unwanted: Callable[[], bool] = lambda: False,
        patience: float = PATIENCE,
    ) -> RemotePath | None:
        """Upload what this worker owns of a save; worker 0 also waits for the others and commits. As ``write_cells``.

        The workers need no disk in common: the bucket is what they share.
        """
        target = self.remote / name_of(snapshot.step)
        if not (target / STATE).is_file():
            self._upload_own(target, snapshot, secret)
            if snapshot.number != 0:
                return None
            records = wait_for_records(
                target,
                snapshot,
                secret,
                has_key=True,
                list_names=lambda: {name for name, _ in target.walk()},
                is_unwanted=is_unwanted,
                patience=patience,
                longest_pause=2.0,
                otherwise="cannot write there",
            )
            if records is None:
                return None
            check_records(records, snapshot)
            body = manifest_body(snapshot.step, snapshot.tree, snapshot.names, records)
            (target / STATE).write_bytes(sealed(body, secret).encode())
        if snapshot.number != 0:
            return None
        for name, _ in list(target.walk()):
            if name.endswith(RECORD) and name != STATE:
                (target / name).unlink(missing_ok=True)
        self._settle(snapshot.step, keep, clean_since)
        return target

    def _upload_own(self, target: RemotePath, snapshot: CellSnapshot, secret: bytes) -> None:
        self._make_root()
        name = snapshot.file_of(snapshot.number, has_key=True)
        with tempfile.TemporaryDirectory(dir=self.root, prefix="share-") as scratch:
            record = write_tensor_file(Path(scratch) / name, own_ranges(snapshot))
            upload_file(Path(scratch) / name, target / name)
        body = {**record.to_json(), "step": snapshot.step}
        (target / (name + RECORD)).write_bytes(sealed(body, secret).encode())

    def _settle(self, step: int, keep: int, clean_since: int | None) -> None:
        """After a commit: say which save is good, remove those that are too old and what killed writers left."""
        steps = {name: step_of(name) or 0 for name in save_names(self.remote)}
        good = next((name for name, at in steps.items() if clean_since is not None and clean_since <= at < step), "")
        if good:
            (self.remote / GOOD).write_bytes(good.encode())
        else:
            good = self.good_save()
        kept = {*list(steps)[:keep], name_of(step), good}
        for name in sorted({name.partition("/")[0] for name, _ in self.remote.walk()}):
            at = step_of(name)
            is_leftover = name not in steps and at is not None and at < step
            if at is not None and name not in kept and (name in steps or is_leftover):
                remove_folder(self.remote / name, STATE)


def _remove_tree(folder: Path) -> None:
    with suppress(OSError):
        for file in folder.rglob("*"):
            file.unlink()
        folder.rmdir()
