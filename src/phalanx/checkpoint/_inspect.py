"""Says what a checkpoint holds: format, and name, dtype, shape and bytes of every tensor. Reads no tensor's data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint._open import JobSave, open_any
from phalanx.shard.checkpoint._checkpoint import Checkpoint, Readable
from phalanx.shard.checkpoint._dcp_folder import DcpFolder
from phalanx.shard.checkpoint._full_files import FullFiles
from phalanx.shard.checkpoint._torch_files import TorchFiles
from phalanx.storage import RemotePath

FORMAT_NAMES = {
    Checkpoint: "phalanx checkpoint",
    DcpFolder: "torch distributed checkpoint",
    FullFiles: "safetensors",
    JobSave: "save of a phalanx job",
    TorchFiles: "torch.save",
}


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds; as text it is a table."""

    path: str
    format: str
    tensors: tuple[TensorRow, ...]
    others: tuple[str, ...] = ()
    """Names of what is no tensor."""
    step: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.tensors)

    def __str__(self) -> str:
        width = max([len("tensor"), *(len(row.name) for row in self.tensors)])
        step = "" if self.step is None else f", step {self.step}"
        lines = [
            f"{self.path}: {self.format}{step}, {len(self.tensors)} tensors, {in_units(self.num_bytes)}",
            f"{'tensor':{width}}  {'dtype':9}  {'bytes':>9}  shape",
        ]
        for row in self.tensors:
            shape = " x ".join(map(str, row.shape)) or "one number"
            lines.append(f"{row.name:{width}}  {row.dtype:9}  {in_units(row.num_bytes):>9}  {shape}")
        if self.others:
            shown = ", ".join(self.others[:10]) + (", ..." if len(self.others) > 10 else "")
            lines.append(f"and {len(self.others)} values that are no tensors: {shown}")
        return "\n".join(lines)


def in_units(num_bytes: float) -> str:
    """Return a number of bytes for people.

    >>> in_units(900), in_units(3_200_000)
    ('900 B', '3.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def inspect(path: str | Path | RemotePath, *, secret: bytes | None = None) -> Contents:
    """Say what lies at ``path``: a job's save (or the newest of its folder), or anything that ``shard.load`` reads.

    >>> print(inspect("saves"))                                  # doctest: +SKIP
    saves/step-000000000200: save of a phalanx job, step 200, 6 tensors, 1.2 MB
    tensor         dtype          bytes  shape
    0.weight       float32     262.1 kB  256 x 256
    """
    return contents_of(open_any(path, secret))


def contents_of(saved: Readable) -> Contents:
    """Say what a reader offers."""
    rows = []
    for name in saved.names():
        size, dtype = saved.size(name), saved.dtype(name)
        shape = tuple(size)
        rows.append(TensorRow(name, str(dtype).removeprefix("torch."), shape, size.numel() * dtype.itemsize))
    return Contents(
        str(saved.path),
        FORMAT_NAMES[type(saved)],
        tuple(rows),
        tuple(getattr(saved, "others", ())),
        getattr(saved, "step", None),
    )
