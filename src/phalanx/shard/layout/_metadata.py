"""Describes a sharded tensor: one ``ShardMetadata`` per shard, the global size, the tensor's properties.

Values only; the same on every rank. ``to_json`` and ``from_json`` carry them between ranks and into index files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.shard.layout._boxes import Box
from phalanx.shard.layout._remote_device import RemoteDevice

_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


@dataclass(init=False, eq=True, slots=True)
class ShardMetadata:
    """One shard: where it begins, how large it is, and where it lives.

    >>> ShardMetadata([0, 5], [5, 5], "rank:1/cpu")
    ShardMetadata(shard_offsets=[0, 5], shard_sizes=[5, 5], placement=rank:1/cpu)
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None

    def __init__(self, shard_offsets: Any, shard_sizes: Any, placement: Any = None) -> None:
        self.shard_offsets = [int(offset) for offset in shard_offsets]
        self.shard_sizes = [int(size) for size in shard_sizes]
        self.placement = None if placement is None else RemoteDevice.of(placement)
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise ValueError(
                f"shard_offsets {self.shard_offsets} and shard_sizes {self.shard_sizes} differ in length; "
                f"give one of each per dim"
            )
        if any(value < 0 for value in (*self.shard_offsets, *self.shard_sizes)):
            raise ValueError(f"shard_offsets {self.shard_offsets} and shard_sizes {self.shard_sizes}: all must be >= 0")

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))

    @property
    def box(self) -> Box:
        return Box(tuple(self.shard_offsets), tuple(self.shard_sizes))

    def to_json(self) -> list[Any]:
        return [
            self.shard_offsets,
            self.shard_sizes,
            None if self.placement is None else repr(self.placement),
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> ShardMetadata:
        return cls(*value)


@dataclass
class TensorProperties:
    """What is needed beside the size to make a tensor."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: Tensor) -> TensorProperties:
        return TensorProperties(
            tensor.dtype, tensor.layout, tensor.requires_grad, torch.contiguous_format, tensor.is_pinned()
        )

    def __getstate__(self) -> tuple[Any, ...]:
        # A memory format cannot be pickled, its name can.
        name = next((name for name, value in _FORMATS.items() if value == self.memory_format), None)
        if name is None:
            raise RuntimeError(
                f"memory format {self.memory_format} cannot be saved; expected one of {sorted(_FORMATS)}"
            )
        return self.dtype, self.layout, self.requires_grad, name, self.pin_memory

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, name, self.pin_memory = state
        if name not in _FORMATS:
            raise RuntimeError(f"unknown memory format {name!r}; expected one of {sorted(_FORMATS)}")
        self.memory_format = _FORMATS[name]


@dataclass
class ShardedTensorMetadata:
    """Describes the global tensor: its shards, its size, its properties."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)
