"""Opens anything that was saved, a job's saves among it.

Owns which of a job's saves is meant (the newest one of a folder) and ``JobSave``, its tensors under the model's names.
Other formats are those of ``shard.load``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from phalanx._signature import resolve_secret
from phalanx.elastic.checkpoint._save_folder import save_names
from phalanx.elastic.checkpoint._saves import STATE, SaveError, check_save, read_manifest, step_of
from phalanx.elastic.checkpoint._state_codec import decode
from phalanx.shard import CheckpointError
from phalanx.shard.checkpoint._checkpoint import Readable
from phalanx.shard.checkpoint._load import fill_state
from phalanx.shard.checkpoint._saved import open_saved
from phalanx.shard.layout._boxes import Box, view_of
from phalanx.storage import Place, RemotePath, as_place


class JobSave:
    """One save of a job: the model's tensors under their own names, the optimizer's below ``optimizer.``.

    Opening reads what the save says it holds; ``check`` looks at all bytes, ``fill`` reads one tensor.
    """

    def __init__(self, path: Place, secret: bytes = b"") -> None:
        self.path = path
        self.bytes_read = 0
        self._secret = secret
        try:
            manifest = read_manifest(path, secret)
            self._files = manifest.open()
            self._stored = {name: self._files.empty(name) for name in manifest.names}
            names = {id(tensor): name for name, tensor in self._stored.items()}
            model = decode(manifest.tree, list(self._stored.values()))["parts"]["model"]
            self._model = {name: names[id(tensor)] for name, tensor in model.items()}
        except (SaveError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a save of a job: {error}") from error
        self.step = manifest.step
        self.model_names = sorted(self._model)

    def check(self) -> None:
        """Compare all files with their checksums; ``CheckpointError`` names the one that is damaged."""
        try:
            check_save(self.path, self._secret)
        except SaveError as error:
            raise CheckpointError(str(error)) from error

    def names(self) -> list[str]:
        return sorted({*self._stored, *self._model})

    def size(self, name: str) -> torch.Size:
        return self._stored[self._key(name)].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[self._key(name)].dtype

    def fill(self, name: str, out: Tensor, box: Box) -> None:
        """Read a box of a tensor into ``out``, in the dtype of ``out``."""
        try:
            found = self._files.read(self._key(name))
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}; {name!r} needs it") from error
        self.bytes_read += found.numel() * found.element_size()
        out.copy_(view_of(found, box, (0,) * out.dim()))

    def _key(self, name: str) -> str:
        key = self._model.get(name, name)
        if key not in self._stored:
            known = ", ".join(self.model_names[:10])
            raise KeyError(f"no tensor {name!r} in {self.path}; the model has {len(self.model_names)}: {known}")
        return key


def open_any(path: str | Path | RemotePath, secret: bytes | None = None) -> Readable:
    """Return a reader for a job's save, the newest one of a job's folder, or anything that ``shard.load`` reads."""
    where = as_place(path)
    if not where.exists():
        raise CheckpointError(f"{where} does not exist")
    if (where / STATE).is_file():
        return JobSave(where, resolve_secret(secret))
    if where.is_dir() and any(step_of(each.name) is not None for each in where.iterdir()):
        return JobSave(where / save_names(where)[0], resolve_secret(secret))
    return open_saved(where, secret=secret)


def load(
    path: str | Path | RemotePath, state: Mapping[str, Any], *, strict: bool = True, secret: bytes | None = None
) -> None:
    """As ``shard.load``, from a job's saves too: fill the tensors of ``state``, each rank what it holds of them.

    >>> load("saves", model.state_dict())                        # doctest: +SKIP
    """
    fill_state(checked(open_any(path, secret)), state, strict=strict)


def checked(saved: Readable) -> Readable:
    """Return a reader whose bytes are those that were written, as far as its format can tell before they are read."""
    if isinstance(saved, JobSave):
        saved.check()
    return saved
