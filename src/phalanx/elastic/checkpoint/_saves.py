"""Writes and reads one save on disk: a folder that is complete or absent, checked when read.

``step-000000000120/state.json`` is the manifest: the state as a JSON tree, the names of its tensors, and of each tensor
file what it holds and its checksum; it has a checksum of its own and with a secret is signed (``_signature``). One
worker that has everything writes one file, ``tensors.safetensors``; several write one each (``_cell_saves``). A save is
*readable* when ``state.json`` parses, has its checksum, a good signature if there is a secret, a known format and the
step of the folder's name; every file has its checksum and holds what is said; all tensors are there from their
first to their last element; and the state can be made of them. Whatever else is found, torn or crafted, is a
``SaveError``. Saves of the first format (one file of counted tensors) are read too. The folder of all saves is
``_save_folder``'s.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx._fields import Fields, load_json
from phalanx._signature import sign, signature_problem
from phalanx.elastic.checkpoint._read_back import forget_pages
from phalanx.elastic.checkpoint._state_codec import Json, decode
from phalanx.elastic.checkpoint._tensor_files import (
    FileRecord,
    TensorFiles,
    TensorRange,
    check_headers,
    check_tiles,
    counted_record,
    hash_file,
    write_tensor_file,
)
from phalanx.elastic.checkpoint._tensor_names import tensor_names
from phalanx.errors import JobStopped, PhalanxError
from phalanx.storage import Place

FORMAT, COUNTED_FORMAT = 2, 1
PREFIX = "step-"
TENSORS, STATE = "tensors.safetensors", "state.json"
_NAME = re.compile(rf"{PREFIX}(\d{{12,18}})")


class SaveError(PhalanxError):
    """A save cannot be read: torn, altered, of another format, or badly signed."""


class NoReadableSave(SaveError, JobStopped):
    """There are saves, and none of them can be read: the job does not begin again at step 0 by itself."""


class NotSaved(JobStopped):
    """All workers were told to leave, and the state could not be written before: what was done since is lost."""


@dataclass(frozen=True)
class Manifest:
    """What a save's ``state.json`` says: enough to read any range of any tensor."""

    path: Place
    step: int
    tree: Json
    names: tuple[str, ...]
    files: tuple[FileRecord, ...]

    def open(self) -> TensorFiles:
        """Return the tensors, to be read by name and range."""
        return TensorFiles(self.path, self.files)

    def state(self, is_left_out: Callable[[str], bool] = lambda name: False) -> Any:
        """Return the state; tensors whose names are left out have shape and dtype only (on the meta device)."""
        with _told(self.path), self.open() as files:
            tensors = [files.empty(name) if is_left_out(name) else files.read(name) for name in self.names]
        return decode(self.tree, tensors)


def name_of(step: int) -> str:
    return f"{PREFIX}{step:012d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder's name says; None when it is not a save's.

    >>> step_of("step-000000000120"), step_of("step-000000000120.old")
    (120, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def write_files(
    folder: Path, step: int, tree: Json, tensors: Sequence[Tensor], secret: bytes, *, verify: bool = False
) -> None:
    """Write both files of a save into an empty folder and have them on the disk; ``verify``: and read them back.
    ``OSError`` when it cannot, or they are not what was written."""
    names = tensor_names(tree, len(tensors))
    ranges = [TensorRange.of(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
    record = write_tensor_file(folder / TENSORS, ranges, verify=verify)
    sync(folder / TENSORS)
    write_manifest(folder, step, tree, names, [record], secret, verify=verify)


def write_manifest(
    folder: Path,
    step: int,
    tree: Json,
    names: Sequence[str],
    files: Iterable[FileRecord],
    secret: bytes,
    *,
    verify: bool = False,
) -> None:
    """Write what makes a folder of tensor files a save, and have it on the disk."""
    write_sealed(folder / STATE, manifest_body(step, tree, names, files), secret)
    sync(folder)
    if verify:
        forget_pages(folder / STATE)
        try:
            read_manifest(folder, secret)
        except SaveError as error:
            raise OSError(errno.EIO, f"{STATE} was read back and is not what was written: {error}") from error


def manifest_body(step: int, tree: Json, names: Sequence[str], files: Iterable[FileRecord]) -> dict[str, Any]:
    """Return what a manifest says."""
    return {
        "format": FORMAT,
        "step": step,
        "names": list(names),
        "files": [record.to_json() for record in files],
        "tree": tree,
    }


def write_sealed(path: Path, body: dict[str, Any], secret: bytes) -> None:
    """Write a JSON object with its checksum and signature, and have it on the disk."""
    path.write_text(sealed(body, secret))
    sync(path)


def sealed(body: dict[str, Any], secret: bytes) -> str:
    """Return a JSON object as text, with its checksum and signature."""
    text = json.dumps(body, sort_keys=True)
    outer = {"checksum": _hash(text.encode()), "body": text}
    return json.dumps({**outer, "mac": sign(secret, text)} if secret else outer)


def read_sealed(path: Place, what: str, secret: bytes) -> Fields:
    """Return the counterpart of ``write_sealed``; ``SaveError`` for what it has not written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SaveError(f"{what} cannot be read: {error!r}") from error
    outer = Fields(load_json(data, what, SaveError), what, SaveError)
    text = outer.text("body")
    if outer.text("checksum") != _hash(text.encode()):
        raise SaveError(f"{what} does not match its checksum")
    problem = signature_problem(secret, text, outer.get("mac"), remedy='pass Saves(secret=b"")')
    if problem:
        raise SaveError(f"{what} {problem}")
    return Fields(load_json(text, what, SaveError), what, SaveError)


def check_save(path: Place, secret: bytes = b"", *, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Return what a save holds if it is readable; else ``SaveError`` says what is wrong with it.

    ``share=(rank, size)``: look at the bytes of this worker's share of the files only, where ``size`` workers check a
    save together; all of them have to find nothing.
    """
    manifest = read_manifest(path, secret)
    for record in manifest.files[share[0] :: share[1]]:
        try:
            found = hash_file(path / record.file)
        except OSError as error:
            raise SaveError(f"{path}: {record.file} cannot be read: {error!r}") from error
        if found != record.checksum:
            raise SaveError(f"{path}: {record.file} does not match its checksum")
        if problem := check_headers(path / record.file, record):
            raise SaveError(f"{path}: {problem}")
    return manifest


def read_manifest(path: Place, secret: bytes = b"") -> Manifest:
    """Read what a save holds, without looking at the tensors' bytes."""
    what = f"{path}: {STATE}"
    fields = read_sealed(path / STATE, what, secret)
    format_ = fields.get("format")
    if format_ not in (FORMAT, COUNTED_FORMAT):
        raise SaveError(f"{path}: format {format_!r}; this release reads {COUNTED_FORMAT} and {FORMAT}")
    step, tree = fields.integer("step", low=0), fields.get("tree")
    if step_of(path.name) not in (None, step):
        raise SaveError(f"{path}: holds step {step}; it was renamed")
    if format_ == FORMAT:
        names = fields.texts("names")
        files = tuple(FileRecord.from_json(one, what, SaveError) for one in fields.items("files"))
        if problem := check_tiles(files, names):
            raise SaveError(f"{path}: {problem}")
    else:
        names, files = _read_counted(path, fields)
    try:
        decode(tree, [torch.empty(0)] * len(names))
    except ValueError as error:
        raise SaveError(f"{what} holds no state: {error}") from error
    return Manifest(path, step, tree, names, files)


def _read_counted(path: Place, fields: Fields) -> tuple[tuple[str, ...], tuple[FileRecord, ...]]:
    """Return what a save of the first format holds."""
    try:
        if hash_file(path / TENSORS) != fields.text("tensors"):  # before its header is believed
            raise SaveError(f"{path}: {TENSORS} does not match its checksum")
    except OSError as error:
        raise SaveError(f"{path}: {TENSORS} cannot be read: {error!r}") from error
    count = fields.integer("num_tensors", low=0)
    with _told(path):
        names = tuple(tensor_names(fields.get("tree"), count))
        return names, (counted_record(path / TENSORS, fields.text("tensors"), names),)


@contextmanager
def _told(path: Place) -> Iterator[None]:
    """Make a ``SaveError`` of whatever a crafted file makes the readers raise."""
    from safetensors import SafetensorError  # start-up: loaded when used

    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise SaveError(f"{path}: its tensors cannot be read: {error!r}") from error


def sync(path: Path) -> None:
    """Have the disk hold a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
