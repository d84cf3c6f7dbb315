"""The buffers of a context: are they the same on all ranks, and cutting them in place.

Owns ``SequenceBuffers``. A buffer stays the same Python object, so that modules that hold it see this rank's part; its
memory is exchanged, not overwritten: views of it elsewhere keep the whole, and restoring it copies nothing. Each
exchange is noted by autograd (version counter), so that a backward that comes too late raises and is not computed with
other positions.

Guarantee: ranks enter together or raise together. What a rank finds wrong by itself it tells the others, in the one
collective (24 bytes per rank) in which digests are compared; only then the details are exchanged, for the message.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.tensor import DTensor


class SequenceBuffers:
    """Tensors of which each has its sequence in one dim."""

    def __init__(self, tensors: Sequence[Tensor], dims: Sequence[int]) -> None:
        self._tensors = list(tensors)
        self._dims = list(dims)
        self._wholes: list[Tensor] = []
        self._positions = torch.empty(0, dtype=torch.int64)

    def check(self, length: int | None, kept: Collection[Tensor]) -> int:
        """Return the length of the sequence; an error for what cannot be cut."""
        if len(self._tensors) != len(self._dims):
            raise ValueError(
                f"{len(self._tensors)} buffers and {len(self._dims)} buffer_seq_dims; expected one dim per buffer"
            )
        for index, (tensor, dim) in enumerate(zip(self._tensors, self._dims, strict=True)):
            self._check_one(index, tensor, dim)
        if len({id(tensor) for tensor in self._tensors}) != len(self._tensors):
            raise ValueError("buffers holds one tensor twice; it can be cut once only")
        if not all(any(tensor is one for one in self._tensors) for tensor in kept):
            raise ValueError("no_restore_buffers holds a tensor that is not among buffers")
        if length is None and not self._tensors:
            raise ValueError("neither buffers nor length; expected one of them: how long is the sequence?")
        lengths = [tensor.shape[dim] for tensor, dim in zip(self._tensors, self._dims, strict=True)]
        wanted = lengths[0] if length is None else length
        for index, found in enumerate(lengths):
            if found < wanted or (found > wanted and length is None):
                raise ValueError(
                    f"buffers[{index}] has {found} positions in dim {self._dims[index]}; expected {wanted}"
                    + (", the length" if length is not None else ", as in buffers[0]")
                    + ". For a table of positions that is longer than the sequence pass length="
                )
        return wanted

    @staticmethod
    def _check_one(index: int, tensor: Tensor, dim: int) -> None:
        if isinstance(tensor, DTensor) or not isinstance(tensor, Tensor):
            raise TypeError(f"buffers[{index}] is a {type(tensor).__name__}; expected a plain tensor")
        if tensor.requires_grad:
            raise ValueError(
                f"buffers[{index}] of shape {tuple(tensor.shape)} requires a gradient; expected inputs, labels or "
                f"tables. Parameters are whole on every rank, and what is computed from them is computed inside"
            )
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"buffer_seq_dims[{index}] is {dim}; buffers[{index}] has shape {tuple(tensor.shape)}")

    def describe(self) -> list[str]:
        """Return one text per buffer, equal on all ranks if the buffers are."""
        return [
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} dim {dim % tensor.dim()}, "
            f"crc {_checksum(tensor):08x}"
            for tensor, dim in zip(self._tensors, self._dims, strict=True)
        ]

    def cut(self, positions: Tensor) -> None:
        """Replace each by its part at ``positions``."""
        self._wholes = [tensor.data for tensor in self._tensors]
        self._positions = positions
        for tensor, part in zip(self._tensors, self._parts(), strict=True):
            _exchange_memory(tensor, part)

    def _parts(self) -> Iterator[Tensor]:
        for whole, dim in zip(self._wholes, self._dims, strict=True):
            yield whole.index_select(dim, self._positions.to(whole.device))

    def written(self, kept: Collection[Tensor]) -> list[int]:
        """Return which of those that are to be restored are not what they were when they were cut."""
        return [
            index
            for index, (tensor, part) in enumerate(zip(self._tensors, self._parts(), strict=True))
            if not any(tensor is one for one in kept)
            and (tensor.shape != part.shape or _checksum(tensor) != _checksum(part))
        ]

    def restore(self, kept: Collection[Tensor]) -> None:
        """Give back what was cut, but for those that are to be ``kept`` as they are."""
        for tensor, whole in zip(self._tensors, self._wholes, strict=True):
            if not any(tensor is one for one in kept):
                _exchange_memory(tensor, whole)
        self._wholes = []


def _exchange_memory(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)


def agree(mesh: DeviceMesh, description: list[str], error: Exception | None) -> None:
    """Raise on all ranks if one has an error or is told to do something else; ``error`` on the rank that has it."""
    group = mesh.get_group()
    if group.size > 1:
        own = zlib.crc32(json.dumps(description).encode())
        told = torch.empty(group.size, 3, dtype=torch.int64)
        group.all_gather_into_tensor(told, torch.tensor([int(error is not None), own, len(description)]))
        if not told[:, 0].any() and bool((told == told[0]).all()):
            return
        everything: list[Any] = group.all_gather_values([None if error is None else str(error), description])
        error = error or ValueError(_difference(mesh, everything))
    if error is not None:
        raise error


def _difference(mesh: DeviceMesh, everything: list[Any]) -> str:
    """Say what another rank reported."""
    ranks, here = mesh.get_group().ranks, f"rank {mesh.get_rank()}: context_parallel"
    for rank, (message, _) in zip(ranks, everything, strict=True):
        if message is not None:
            return f"{here} was not entered, because rank {rank} cannot: {message}"
    table = "\n".join(f"  rank {rank}: {lines}" for rank, (_, lines) in zip(ranks, everything, strict=True))
    return (
        f"{here} got other buffers or settings than the other ranks of its mesh:\n{table}\n"
        f"The ranks of a context share one batch: expected the same buffers, whole, on all of them"
    )
