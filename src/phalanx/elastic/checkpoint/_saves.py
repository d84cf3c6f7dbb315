"""Writes and reads one save on disk: a folder that is complete or absent, checked when read.

``step-000000000120/tensors.safetensors`` holds the tensors, ``state.json`` the rest with the checksum of the tensor
file and its own; with a secret it is signed (``_signature``). A save is *readable* when ``state.json``
parses, has its checksum, a good signature if there is a secret, a known format and the step of the folder's name; the
tensor file has its checksum and the tensors that are spoken of; and the state can be made of both. Whatever else is
found, torn or crafted, is a ``SaveError``. The folder of all saves is ``_save_folder``'s.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx._fields import Fields, load_json
from phalanx._signature import sign, signature_problem
from phalanx.elastic.checkpoint._state_codec import Json, decode
from phalanx.errors import JobStopped, PhalanxError

FORMAT = 1
PREFIX = "step-"
TENSORS, STATE = "tensors.safetensors", "state.json"
_NAME = re.compile(rf"{PREFIX}(\d{{12,18}})")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class SaveError(PhalanxError):
    """A save cannot be read: torn, altered, of another format, or badly signed."""


class NoReadableSave(SaveError, JobStopped):
    """There are saves, and none of them can be read: the job does not begin again at step 0 by itself."""


class NotSaved(JobStopped):
    """All workers were told to leave, and the state could not be written before: what was done since is lost."""


@dataclass(frozen=True)
class Save:
    """One readable save: its step, and the JSON tree with the tensors that it was made of (see ``_codec``)."""

    step: int
    tree: Json
    tensors: list[Tensor]


def name_of(step: int) -> str:
    return f"{PREFIX}{step:012d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder's name says; None when it is not a save's.

    >>> step_of("step-000000000120"), step_of("step-000000000120.old")
    (120, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def write_files(folder: Path, step: int, tree: Json, tensors: Sequence[Tensor], secret: bytes) -> None:
    """Write both files of a save into an empty folder and have them on the disk. ``OSError`` when it cannot."""
    tensor_file = folder / TENSORS
    _write_tensors(tensor_file, tensors)
    body = {
        "format": FORMAT,
        "step": step,
        "num_tensors": len(tensors),
        "tensors": _hash_file(tensor_file),
        "tree": tree,
    }
    text = json.dumps(body, sort_keys=True)
    outer = {"checksum": _hash(text.encode()), "body": text}
    (folder / STATE).write_text(json.dumps({**outer, "mac": sign(secret, text)} if secret else outer))
    for path in [tensor_file, folder / STATE, folder]:
        sync(path)


def _write_tensors(path: Path, tensors: Sequence[Tensor]) -> None:
    from safetensors import SafetensorError  # start-up: loaded when used
    from safetensors.torch import save_file

    try:
        save_file({f"{i:06d}": tensor.contiguous() for i, tensor in enumerate(tensors)}, path)
    except SafetensorError as error:  # also what the disk says, as text
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def read_save(path: Path, secret: bytes = b"") -> Save:
    """Read and check one save. ``SaveError`` says what is wrong with it."""
    from safetensors import SafetensorError  # start-up: loaded when used
    from safetensors.torch import load_file

    fields = _check(path, secret)
    try:
        loaded = load_file(path / TENSORS)
        tensors = [loaded[f"{i:06d}"] for i in range(fields.integer("num_tensors", low=0))]
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise SaveError(f"{path}: {TENSORS} cannot be read: {error!r}") from error
    return Save(fields.integer("step"), fields.get("tree"), tensors)


def check_save(path: Path, secret: bytes = b"") -> None:
    """As ``read_save``, without holding the tensors in memory."""
    _check(path, secret)


def _check(path: Path, secret: bytes) -> Fields:
    fields = _read_body(path, secret)
    if fields.get("format") != FORMAT:
        raise SaveError(f"{path}: format {fields.get('format')!r}; this release reads {FORMAT}")
    step = fields.integer("step", low=0)
    if step_of(path.name) not in (None, step):
        raise SaveError(f"{path}: holds step {step}; it was renamed")
    try:
        found = _hash_file(path / TENSORS)
    except OSError as error:
        raise SaveError(f"{path}: {TENSORS} cannot be read: {error!r}") from error
    if found != fields.text("tensors"):
        raise SaveError(f"{path}: {TENSORS} does not match its checksum")
    count = _count_tensors(path / TENSORS)
    if count != fields.integer("num_tensors", low=0):
        raise SaveError(f"{path}: {TENSORS} does not hold the {fields.get('num_tensors')} tensors of the state")
    try:
        decode(fields.get("tree"), [torch.empty(0)] * count)
    except ValueError as error:
        raise SaveError(f"{path}: {STATE} holds no state: {error}") from error
    return fields


def _read_body(path: Path, secret: bytes) -> Fields:
    what = f"{path}: {STATE}"
    try:
        data = (path / STATE).read_bytes()
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


def _count_tensors(path: Path) -> int:
    """Return how many tensors a file lists under the names that we give them."""
    from safetensors import SafetensorError, safe_open  # start-up: loaded when used

    try:
        with safe_open(path, framework="pt") as file:
            names: Any = file.keys()
    except (OSError, ValueError, SafetensorError) as error:
        raise SaveError(f"{path} cannot be read: {error!r}") from error
    if sorted(names) != [f"{i:06d}" for i in range(len(names))]:
        raise SaveError(f"{path} holds other tensors than a save does")
    return len(names)


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


def _hash_file(path: Path) -> str:
    sum_ = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sum_.update(block)
    return sum_.hexdigest()
