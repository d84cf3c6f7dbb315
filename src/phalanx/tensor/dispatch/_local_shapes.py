"""What each rank of a mesh brings to a call, told to all of them, so that all decide alike.

Owns ``LocalShape`` (dtype and shape of one rank's tensor, as numbers that can be sent) and ``gathered_shapes``. Who
raises because of *another* rank's tensor must be sure that the other raises too: on more than one axis that takes the
shapes of all of the mesh, not those along one axis.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}
_BLOCK = 8  # sizes are sent in blocks: ranks whose tensors have other numbers of dims send as much
_SHOWN = 16


class LocalShape(NamedTuple):
    """One rank's tensor; ``facts`` is a number for whatever else must be the same on every rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    facts: int = 0

    @classmethod
    def of(cls, tensor: Tensor, *facts: object) -> LocalShape:
        return cls(tuple(tensor.shape), tensor.dtype, zlib.crc32(repr(facts).encode()) if facts else 0)

    def numbers(self) -> list[int]:
        padding = -len(self.shape) % _BLOCK if self.shape else _BLOCK
        return [len(self.shape), _NUMBER_OF[self.dtype], self.facts, *self.shape, *[0] * padding]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> LocalShape:
        ndim, dtype, facts = numbers[:3]
        return cls(tuple(numbers[3 : 3 + ndim]), _DTYPES[dtype], facts)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


Coordinate = tuple[int, ...]


def gathered_shapes(
    mesh: DeviceMesh, axes: Sequence[int], own: LocalShape, device: str
) -> dict[Coordinate, LocalShape]:
    """Return the shapes of the ranks that differ from this one along ``axes`` only; one small gather for each axis."""
    numbers = torch.tensor(own.numbers(), device=device)
    length = numbers.numel()
    for axis in reversed(axes):  # what arrives is then in the order of the coordinates
        group = mesh.get_group(axis)
        if group.size > 1:
            rows = numbers.new_empty(group.size * numbers.numel())
            group.all_gather_into_tensor(rows, numbers)
            numbers = rows
    rows_of_all = numbers.view(-1, length).tolist()
    return dict(zip(coordinates(mesh, axes), map(LocalShape.from_numbers, rows_of_all), strict=True))


def coordinates(mesh: DeviceMesh, axes: Sequence[int]) -> list[Coordinate]:
    own = mesh.get_coordinate()
    assert own is not None, "a rank outside of the mesh meets nobody in it"
    ranges = [range(n) if axis in axes else (own[axis],) for axis, n in enumerate(mesh.shape)]
    return list(itertools.product(*ranges))


def listing(mesh: DeviceMesh, shapes: dict[Coordinate, LocalShape]) -> str:
    """``shapes`` with their ranks, for an error message."""
    ranks = [int(mesh.mesh[where]) for where in shapes]
    more = f" (and {len(ranks) - _SHOWN} more)" if len(ranks) > _SHOWN else ""
    return f"{[str(one) for one in shapes.values()][:_SHOWN]} on ranks {ranks[:_SHOWN]}{more}"
