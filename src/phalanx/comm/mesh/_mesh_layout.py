"""Computes which ranks sit where on a device mesh, as pure functions of shapes and strides.

Owns ``Axis`` and ``MeshLayout``. A layout says nothing about ranks themselves: it maps coordinates to
*positions* in the flat list of the root mesh's ranks, so slicing, flattening and unflattening a mesh never
touch more than a few integers, whatever the number of ranks. ``DeviceMesh`` (``_mesh.py``) adds ranks, names
and groups.

Invariants:
- An axis is a tuple of modes ``(size, stride)``, slowest first. An axis of the root mesh has one mode;
  flattening axes that are not neighbours gives several; an axis of size one has none.
- Modes that can be merged are merged, so equal axes compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """One mesh axis: ``modes`` of (size, stride), slowest first.

    >>> Axis(((2, 12), (4, 1))).offsets().tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    """

    modes: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return math.prod(size for size, _ in self.modes)

    @property
    def stride(self) -> int | tuple[int, ...]:
        """The distance between neighbours; a tuple where no single number says it (empty: no neighbours)."""
        strides = tuple(stride for _, stride in self.modes)
        return strides[0] if len(strides) == 1 else strides

    def offsets(self) -> Positions:
        """Positions of this axis's members relative to its first."""
        result = np.zeros(1, dtype=np.int64)
        for size, stride in self.modes:
            steps = np.arange(size, dtype=np.int64) * stride
            result = (result[:, None] + steps[None, :]).reshape(-1)
        return result

    def coordinate(self, position: int) -> int:
        """Return where along this axis ``position`` of the root lies."""
        index = 0
        for size, stride in self.modes:
            index = index * size + position // stride % size
        return index

    def offset(self, coordinate: int) -> int:
        """Return the inverse of ``coordinate``: how far the member at ``coordinate`` is from the first."""
        total = 0
        for size, stride in reversed(self.modes):
            coordinate, digit = divmod(coordinate, size)
            total += digit * stride
        return total


def merge_modes(modes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighbouring modes that one stride describes, and drop those of size one.

    >>> merge_modes([(2, 12), (3, 4), (4, 1)])
    ((24, 1),)
    """
    merged: list[tuple[int, int]] = []
    for size, stride in modes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def split_modes(axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Cut one axis into several of the given sizes, slowest first.

    >>> split_modes(Axis(((4, 1),)), (2, 2))
    (Axis(modes=((2, 2),)), Axis(modes=((2, 1),)))
    """
    if math.prod(sizes) != axis.size:
        raise ValueError(f"cannot unflatten an axis of size {axis.size} into {tuple(sizes)}: their product differs")
    rest = list(axis.modes)
    result = []
    for wanted in sizes:
        taken: list[tuple[int, int]] = []
        left = wanted
        while left > 1:
            size, stride = rest[0]
            if left % size == 0:
                taken.append(rest.pop(0))
                left //= size
            elif size % left == 0:
                taken.append((left, stride * (size // left)))
                rest[0] = (size // left, stride)
                left = 1
            else:
                raise ValueError(
                    f"cannot unflatten {axis.modes} into {tuple(sizes)}: a part of size {wanted} straddles "
                    f"ranks that no stride describes"
                )
        result.append(Axis(merge_modes(taken)))
    return tuple(result)


@dataclass(frozen=True)
class MeshLayout:
    """Axes of one mesh over the positions of its root.

    >>> MeshLayout.of_shape((2, 3, 4)).select((0, 2)).strides
    (12, 1)
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> MeshLayout:
        """Return a root: row-major, the last axis fastest."""
        axes: list[Axis] = []
        stride = 1
        for size in reversed(shape):
            axes.append(Axis(merge_modes([(size, stride)])))
            stride *= size
        return cls(tuple(reversed(axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def strides(self) -> tuple[int | tuple[int, ...], ...]:
        return tuple(axis.stride for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def select(self, indices: Sequence[int]) -> MeshLayout:
        return MeshLayout(tuple(self.axes[i] for i in indices))

    def flatten(self) -> MeshLayout:
        """Return all axes as one."""
        modes = [mode for axis in self.axes for mode in axis.modes]
        return MeshLayout((Axis(merge_modes(modes)),))

    def unflatten(self, index: int, sizes: Sequence[int]) -> MeshLayout:
        return MeshLayout(self.axes[:index] + split_modes(self.axes[index], sizes) + self.axes[index + 1 :])

    def offsets(self) -> Positions:
        """Positions of all members relative to the first, shaped like the mesh."""
        result = np.zeros((), dtype=np.int64)
        for axis in self.axes:
            result = result[..., None] + axis.offsets()
        return result

    def coordinate(self, position: int) -> tuple[int, ...]:
        return tuple(axis.coordinate(position) for axis in self.axes)

    def base(self, position: int) -> int:
        """Return the position of this mesh's first member, in the copy of the mesh that contains ``position``."""
        return position - sum(axis.offset(axis.coordinate(position)) for axis in self.axes)

    def members(self, position: int) -> Positions:
        """Positions of the copy of this mesh that contains ``position``, shaped like the mesh."""
        return self.base(position) + self.offsets()

    def copies(self, root_size: int) -> Positions:
        """Positions of every copy of this mesh in a root of ``root_size``: one row each, in order of their
        first.
        """
        return complement(self, root_size)[:, None] + self.offsets().reshape(1, -1)


def complement(layout: MeshLayout, root_size: int) -> Positions:
    """First positions of all copies of ``layout`` in ``root_size`` positions, ascending.

    A position starts a copy exactly when all its coordinates in the layout are zero.
    """
    positions = np.arange(root_size, dtype=np.int64)
    first = np.ones(root_size, dtype=bool)
    for axis in layout.axes:
        for size, stride in axis.modes:
            first &= positions // stride % size == 0
    return positions[first]


def is_in_root_order(layout: MeshLayout) -> bool:
    """Return whether the axes neither overlap nor come out of order: each is strictly slower than the next."""
    previous: int | None = None
    for axis in layout.axes:
        if axis.size == 1:
            continue
        slowest = axis.modes[0][0] * axis.modes[0][1]
        if previous is not None and slowest > previous:
            return False
        previous = axis.modes[-1][1]
    return True
