"""Has torch write a distributed checkpoint from tensors that are read one by one.

The format is torch's, and so is its writer; this module is loaded when it is needed, since torch's package is large.
The planner sees tensors on the meta device; their data is read when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save


class _ReadingPlanner(DefaultSavePlanner):
    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def write_dcp(
    folder: Path, described: Mapping[str, tuple[torch.dtype, torch.Size]], read: Callable[[str], Tensor]
) -> None:
    """Write a folder with these tensors; ``read`` gives each when its turn comes."""
    state = {name: torch.empty(size, dtype=dtype, device="meta") for name, (dtype, size) in described.items()}
    save(state, storage_writer=FileSystemWriter(folder, thread_count=1), planner=_ReadingPlanner(read), no_dist=True)
