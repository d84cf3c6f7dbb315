"""Writes what was saved in another format, without a job or a group: for Hugging Face's tools, DCP or torch.

Phases: open the source, choose names and dtypes, write beside the target under another name, rename. Tensors go one
after the other straight into mapped files, so that memory holds one of them at most; torch's own writers, which keep
what they are given, get them from a mapped file beside the target.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint._open import JobSave, checked, open_any
from phalanx.shard import CheckpointError
from phalanx.shard.checkpoint._checkpoint import Readable
from phalanx.shard.checkpoint._dcp_folder import METADATA
from phalanx.shard.checkpoint._full_files import FILE_BYTES, INDEX, split_into_files, upload_files
from phalanx.shard.files._safetensors import mapped_file, put_in_place, sync_folder
from phalanx.shard.layout._boxes import Box
from phalanx.storage import RemotePath, as_place
from phalanx.storage._transfer import upload_file, upload_folder

Described = dict[str, tuple[torch.dtype, torch.Size]]
"""What is written: by name, dtype and size."""


def export(
    source: str | Path | RemotePath,
    target: str | Path | RemotePath,
    *,
    format: str = "hf",
    names: str | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    max_file_bytes: int = FILE_BYTES,
    secret: bytes | None = None,
) -> list[str]:
    """Write the tensors of ``source`` to ``target`` as ``format`` says; the names that were written.

    ``source`` is a job's save or folder of saves, or anything that ``shard.load`` reads. ``format`` is ``"hf"`` (a
    folder of safetensors files), ``"dcp"`` (a folder of ``torch.distributed.checkpoint``) or ``"torch"`` (a file of
    ``torch.save``). Of a job the model's tensors are written, of others all; ``names`` is a pattern such as
    ``"encoder.*"``. ``dtype`` casts floating-point tensors.

    >>> export("saves", "exported", dtype=torch.bfloat16)        # doctest: +SKIP

    Raises:
        CheckpointError: the source cannot be read, or the disk does not take the target, of which nothing is left.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
    saved, where = checked(open_any(source, secret)), as_place(target)
    described = _describe(saved, names, dtype)
    if where.exists() and not overwrite:
        raise CheckpointError(f"{where} exists; pass overwrite=True (--overwrite) to replace it")
    if isinstance(where, RemotePath):
        _export_to_bucket(saved, described, where, format, max_file_bytes)
    else:
        _export_to_disk(saved, described, where, format, max_file_bytes)
    return list(described)


def _export_to_bucket(
    saved: Readable, described: Described, where: RemotePath, format: str, max_file_bytes: int
) -> None:
    """Write to the disk first: a bucket takes files, and memory holds one tensor at most."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as scratch:
        made = Path(scratch) / "exported"
        _export_to_disk(saved, described, made, format, max_file_bytes)
        try:
            if format == "hf":
                upload_files(made, where)
            elif format == "dcp":
                upload_folder(made, where, METADATA)
            else:
                upload_file(made, where)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be written: {error}") from error


def _export_to_disk(saved: Readable, described: Described, where: Path, format: str, max_file_bytes: int) -> None:
    partial = where.with_name(f"{where.name}.partial")
    _remove(partial)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        FORMATS[format](saved, described, partial, max_file_bytes)
        if partial.is_dir():
            put_in_place(partial, where, sync=True)
        else:
            os.replace(partial, where)
            sync_folder(where.parent)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be written: {type(error).__name__}: {error}") from error
    finally:
        _remove(partial)


def _describe(saved: Readable, pattern: str | None, dtype: torch.dtype | None) -> Described:
    every = saved.model_names if isinstance(saved, JobSave) and pattern is None else saved.names()
    wanted = [name for name in every if pattern is None or fnmatch(name, pattern)]
    if not wanted:
        raise CheckpointError(f"no tensor of {saved.path} is called {pattern!r}; there are {', '.join(every[:10])}")
    found = {}
    for name in wanted:
        own = saved.dtype(name)
        found[name] = (dtype if dtype is not None and own.is_floating_point else own, saved.size(name))
    return found


def _write_hf(saved: Readable, described: Described, folder: Path, max_file_bytes: int) -> None:
    folder.mkdir()
    sizes = {name: size.numel() * dtype.itemsize for name, (dtype, size) in described.items()}
    files = list(split_into_files(sizes, max_file_bytes))
    for file, names in files:
        _write_mapped(saved, {name: described[name] for name in names}, folder / file)
    if len(files) > 1:
        placed = {name: file for file, names in files for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        with open(folder / INDEX, "w") as out:
            json.dump(index, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
    sync_folder(folder)


def _write_mapped(saved: Readable, described: Described, file: Path) -> None:
    with mapped_file(file, described) as mapped:
        for name, there in mapped.items():
            saved.fill(name, there, Box.of_size(there.shape))


def _write_torch(saved: Readable, described: Described, file: Path, max_file_bytes: int) -> None:
    """Fill a mapped file first: torch then writes from pages that the system may drop."""
    scratch = file.with_name(f"{file.name}.tensors")
    with ExitStack() as stack:
        stack.callback(_remove, scratch)
        mapped = stack.enter_context(mapped_file(scratch, described))
        for name, there in mapped.items():
            saved.fill(name, there, Box.of_size(there.shape))
        torch.save(dict(mapped), file)


def _write_dcp(saved: Readable, described: Described, folder: Path, max_file_bytes: int) -> None:
    from phalanx.comm.torch_interop._dcp_writer import write_dcp  # start-up: torch's checkpoint package is large

    scratch = folder.with_name(f"{folder.name}.tensors")
    with ExitStack() as stack:
        stack.callback(_remove, scratch)
        mapped = stack.enter_context(mapped_file(scratch, described))  # torch's writer keeps all that it was given

        def read(name: str) -> Tensor:
            saved.fill(name, mapped[name], Box.of_size(mapped[name].shape))
            return mapped[name]

        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group: there need not be one
        write_dcp(folder, described, read)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


FORMATS: Mapping[str, Callable[[Readable, Described, Path, int], None]] = {
    "hf": _write_hf,
    "dcp": _write_dcp,
    "torch": _write_torch,
}
