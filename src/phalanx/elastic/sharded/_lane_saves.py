"""What a lane of a tensor parallel job writes of a save and reads from one: parts of the model's own tensors.

A lane's cells are ranges of its shards; in a save they are ranges of equal parts of whole tensors (``Chunk``), or of
the tensor itself where it is cut along its first dim. What tensor parallelism has not cut is the same in all lanes: the
first one writes it. So a save has the model's tensors, and is read by a job of any degree, and by one of none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._tensor_files import Chunk, TensorFiles, TensorRange

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding


class LaneSaves:
    """Translates between the tensors of this worker's lane and those of the model."""

    def __init__(self, sharding: JobSharding) -> None:
        groups = sharding.tensor_groups
        assert groups is not None, "the job has lanes"
        self._is_first = groups.lane == 0
        self._chunks = {parameter.name: groups.chunk(parameter.name) for parameter in sharding.units.parameters}
        self._wholes = {parameter.name: groups.whole_shape(parameter.name) for parameter in sharding.units.parameters}
        names = {parameter.key: parameter.name for parameter in sharding.units.parameters}
        self._owners = {f"optimizer.state.{number}.": names[key] for key, number in sharding.pieces.numbers.items()}

    def _chunk_of(self, name: str, shape: Sequence[int], *, whole: bool) -> Chunk | None:
        """Return the part that this lane has of a tensor of a save; None if it is not cut.

        ``shape`` tells a tensor that is laid out like its parameter from others of the optimizer: in the model's if
        ``whole``, else in this lane's.
        """
        owner = name if name in self._wholes else self._owners.get(name[: name.rfind(".") + 1])
        chunk = None if owner is None else self._chunks[owner]
        if owner is None or chunk is None:
            return None
        like = self._wholes[owner] if whole else chunk.shape(self._wholes[owner])
        return chunk if tuple(shape) == like else None

    def ranges(self, of_lane: Sequence[TensorRange]) -> list[TensorRange]:
        """Return what this worker writes, of what it owns of its lane's tensors."""
        found = []
        for one in of_lane:
            chunk = self._chunk_of(one.name, one.shape, whole=False)
            if chunk is None:
                found += [one] if self._is_first else []
                continue
            shape = self._whole(one.shape, chunk)
            if chunk.dim:
                found.append(replace(one, shape=shape, chunk=chunk))
                continue
            before = chunk.index * math.prod(one.shape)
            found.append(replace(one, shape=shape, begin=before + one.begin, end=before + one.end))
        return found

    def meta(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return what stands in a saved state for a tensor of the lane."""
        chunk = self._chunk_of(name, shape, whole=False)
        return torch.empty(shape if chunk is None else self._whole(shape, chunk), dtype=dtype, device="meta")

    @staticmethod
    def _whole(shape: Sequence[int], chunk: Chunk) -> tuple[int, ...]:
        return tuple(size * chunk.count if dim == chunk.dim else size for dim, size in enumerate(shape))

    def of_lane(self, states: Mapping[int, State]) -> dict[int, State]:
        """Return the optimizer's states of a save, with tensors of this lane's shapes for those on the meta device."""
        found: dict[int, State] = {}
        for number, state in states.items():
            found[number] = dict(state)
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_meta:
                    chunk = self._chunk_of(f"optimizer.state.{number}.{key}", value.shape, whole=True)
                    found[number][key] = value if chunk is None else chunk.of(value)
        return found

    def reader(self, files: TensorFiles) -> LaneFiles:
        return LaneFiles(files, self)

    def part(self, files: TensorFiles, name: str) -> Chunk | None:
        return self._chunk_of(name, files.empty(name).shape, whole=True)


class LaneFiles:
    """Reads the tensors of a save as a lane has them; stands for ``TensorFiles``."""

    def __init__(self, files: TensorFiles, saves: LaneSaves) -> None:
        self._files, self._saves = files, saves

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        chunk = self._saves.part(self._files, name)
        if chunk is None or end is None:
            return self._files.read(name, begin, end)
        return self._files.read_part(name, chunk, begin, end)
