"""Opens saved tensors, whoever wrote them: a checkpoint of ours, safetensors files, torch's files and folders.

Owns the choice of the reader, by what lies at the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from phalanx.shard.checkpoint._checkpoint import Checkpoint, Readable
from phalanx.shard.checkpoint._dcp_folder import DcpFolder
from phalanx.shard.checkpoint._full_files import FullFiles
from phalanx.shard.checkpoint._torch_files import TorchFiles
from phalanx.storage import RemotePath, as_place


def open_saved(
    path: str | Path | RemotePath, *, verify: bool | Literal["full"] = True, secret: bytes | None = None
) -> Readable:
    """Return a reader for what lies at ``path``; ``CheckpointError`` when that is nothing we know.

    ``verify`` and ``secret``: see ``Checkpoint``; other formats have neither digests nor signatures.
    """
    where = as_place(path)
    if DcpFolder.is_at(where):
        return DcpFolder(where)
    if TorchFiles.are_at(where):
        return TorchFiles(where)
    if FullFiles.are_at(where):
        return FullFiles(where)
    return Checkpoint(where, verify=verify, secret=secret)


def prefix_of(stored: Iterable[str], wanted: Sequence[str]) -> str:
    """Return what stands before the wanted names in the stored ones; empty when they are there as they are.

    Trainers put a model's tensors under a key of their own. Only a prefix under which all are found counts, and only
    if there is one.

    >>> prefix_of(["model.w", "model.b", "step"], ["w", "b"])
    'model.'
    >>> prefix_of(["model.w", "ema.w"], ["w"])
    ''
    """
    known = set(stored)
    if not wanted or any(name in known for name in wanted):
        return ""
    ends = f".{wanted[0]}"
    found = [name.removesuffix(wanted[0]) for name in known if name.endswith(ends)]
    fitting = [prefix for prefix in found if all(prefix + name in known for name in wanted)]
    return fitting[0] if len(fitting) == 1 else ""
