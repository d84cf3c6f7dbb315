"""Saves on disk: one directory per save, complete or absent, checked when read.

``DIR/step-000000120/tensors.safetensors`` holds the tensors, ``state.json`` the rest with the checksum of the tensor
file and its own. A save is written under a temporary name, flushed to the disk, and renamed: a crash leaves either
the whole save or a leftover that the next write removes. What is torn or altered anyway (a disk's fault) fails its
checksum and the save before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.elastic._codec import Json
from phalanx.errors import PhalanxError

FORMAT = 1
PREFIX, PARTIAL = "step-", ".partial-"


class SaveError(PhalanxError):
    """A save cannot be read: torn, altered, or of another format."""


@dataclass(frozen=True)
class Save:
    """One readable save: its step, the JSON tree and the tensors (see ``_codec``)."""

    step: int
    tree: Json
    tensors: list[Tensor]


def write_save(directory: Path, step: int, tree: Json, tensors: Sequence[Tensor], *, keep: int) -> Path:
    """Write a save durably, then remove all but the newest ``keep``."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    final = directory / f"{PREFIX}{step:012d}"
    partial = directory / f"{PARTIAL}{step}-{socket.gethostname()}-{os.getpid()}"
    partial.mkdir()
    tensor_file = partial / "tensors.safetensors"
    save_file({f"{i:06d}": tensor.contiguous() for i, tensor in enumerate(tensors)}, tensor_file)
    body = {
        "format": FORMAT,
        "step": step,
        "num_tensors": len(tensors),
        "tensors": _hash_file(tensor_file),
        "tree": tree,
    }
    text = json.dumps(body, sort_keys=True)
    (partial / "state.json").write_text(json.dumps({"checksum": _hash(text.encode()), "body": text}))
    for path in [tensor_file, partial / "state.json", partial]:
        _sync(path)
    _put_in_place(partial, final)
    _sync(directory)
    for old in sorted(directory.glob(f"{PREFIX}*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _put_in_place(partial: Path, final: Path) -> None:
    while True:
        try:
            os.rename(partial, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            read_save(final)
        except SaveError:
            with suppress(FileNotFoundError):  # another worker may be at it too
                shutil.rmtree(final)
        else:  # the same step, saved before by another worker, maybe just now: the same content
            shutil.rmtree(partial)
            return


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed writers of this machine began; another worker may be writing its own just now."""
    for leftover in directory.glob(f"{PARTIAL}*"):
        host, _, pid = leftover.name.removeprefix(PARTIAL).partition("-")[2].rpartition("-")
        if host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(leftover, ignore_errors=True)


def read_save(path: Path) -> Save:
    """Read and check one save. ``SaveError`` says what is wrong with it."""
    from safetensors.torch import load_file

    try:
        outer = json.loads((path / "state.json").read_bytes())
        text, checksum = outer["body"], outer["checksum"]
        body: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SaveError(f"{path}: state.json cannot be read: {error!r}") from error
    if checksum != _hash(text.encode()):
        raise SaveError(f"{path}: state.json does not match its checksum")
    if body["format"] != FORMAT:
        raise SaveError(f"{path}: format {body['format']}; this release reads {FORMAT}")
    tensor_file = path / "tensors.safetensors"
    try:
        found = _hash_file(tensor_file)
    except OSError as error:
        raise SaveError(f"{path}: tensors.safetensors cannot be read: {error!r}") from error
    if found != body["tensors"]:
        raise SaveError(f"{path}: tensors.safetensors does not match its checksum")
    loaded = load_file(tensor_file)
    return Save(body["step"], body["tree"], [loaded[f"{i:06d}"] for i in range(body["num_tensors"])])


def find_save(directory: Path) -> tuple[Save | None, list[str]]:
    """The newest readable save, and what was wrong with newer ones."""
    problems: list[str] = []
    for path in sorted(directory.glob(f"{PREFIX}*"), reverse=True):
        try:
            return read_save(path), problems
        except SaveError as error:
            problems.append(str(error))
    return None, problems


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_file(path: Path) -> str:
    sum_ = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sum_.update(block)
    return sum_.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
