"""Spec: mesh, placements, global shape and dtype of one distributed tensor, and what follows from them.

Owns ``Spec``. Specs are interned: two equal specs are one object, so a comparison is ``is`` and a hash is free, which
the dispatch cache lives on. They are pure values; nothing here communicates.

Invariants: placements are normalized (non-negative dims, one per axis); the mesh's coordinate is this rank's, so
``local_shape`` is what this rank holds.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx._without_modes import without_user_modes
from phalanx.comm import DeviceMesh
from phalanx.tensor.layout._placement import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    chunk_starts,
    held_size,
    indices_of,
    normalize,
)

AxisShard = tuple[Shard, int, int]


class Spec:
    """Layout of one distributed tensor. Build with ``Spec.of``.

    >>> Spec.of(mesh, (Shard(0),), (5, 3), torch.float32).local_shape   # doctest: +SKIP
    (2, 3)
    """

    __slots__ = (
        "__weakref__", "coordinate", "dtype", "is_outside", "is_partial", "local_shape", "local_strides", "mesh",
        "num_elements", "placements", "routes", "shape", "template", "variants",
    )  # fmt: skip

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    dtype: torch.dtype
    num_elements: int
    coordinate: tuple[int, ...]  # this rank's in the mesh; the origin, for a rank outside of it
    is_outside: bool  # this rank is, and holds nothing
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]  # of a row-major shard
    is_partial: bool  # on some axis
    template: Tensor  # a meta tensor of the global shape, which wrappers are made from
    routes: dict[Any, Any]  # placements as users gave them -> the ``Route`` that ``redistribute`` took before
    variants: dict[Any, Any]  # other specs and plans derived from this one, made on demand

    _known: ClassVar[weakref.WeakValueDictionary[Any, Spec]] = weakref.WeakValueDictionary()
    _lock = threading.Lock()

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> Spec:
        size = torch.Size(shape)
        key = (mesh, tuple(placements), size, dtype)
        with cls._lock:
            known = cls._known.get(key)
            if known is None:
                known = cls._known[key] = cls.__new__(cls)
                known.mesh = mesh
                known.placements = normalize(placements, mesh.ndim, len(size))
                known.shape = size
                known.dtype = dtype
                known.num_elements = math.prod(size)
                own = mesh.get_coordinate()
                known.is_outside, known.coordinate = own is None, own or (0,) * mesh.ndim
                known.local_shape = (0,) * max(1, len(size)) if own is None else known.shape_at(known.coordinate)
                known.is_partial = any(isinstance(p, Partial) for p in known.placements)
                known.variants, known.routes = {}, {}
                with (
                    without_user_modes(),
                    torch.inference_mode(False),
                ):  # checkpointing saves wrappers for backward
                    known.template = torch.empty(size, dtype=dtype, device="meta")
                    known.local_strides = torch.empty(known.local_shape, device="meta").stride()
            return known

    def with_dtype(self, dtype: torch.dtype) -> Spec:
        if dtype is self.dtype:
            return self
        found: Spec | None = self.variants.get(dtype)
        if found is None:
            found = self.variants[dtype] = Spec.of(self.mesh, self.placements, self.shape, dtype)
        return found

    def with_placements(self, placements: Sequence[Placement]) -> Spec:
        given = tuple(placements)
        if given == self.placements:
            return self
        found: Spec | None = self.variants.get(given)
        if found is None:
            found = self.variants[given] = Spec.of(self.mesh, given, self.shape, self.dtype)
        return found

    @property
    def replicated(self) -> Spec:
        return self.with_placements((REPLICATE,) * self.mesh.ndim)

    @property
    def cotangent(self) -> Spec:
        """Return the layout of a gradient for this tensor: its own, but replicated where the tensor is partial."""
        if not self.is_partial:
            return self
        found: Spec | None = self.variants.get("cotangent")
        if found is None:
            placements = tuple(REPLICATE if isinstance(p, Partial) else p for p in self.placements)
            found = self.variants["cotangent"] = self.with_placements(placements)
        return found

    def of_gradient(self, placements: Sequence[Placement]) -> Spec:
        """Return the layout of a gradient of this rank's shard, if the user says ``grad_placements=placements``."""
        given = self.with_placements(normalize(placements, self.mesh.ndim, len(self.shape)))
        if given.local_shape != self.local_shape:
            raise ValueError(
                f"rank {self.mesh.get_rank()}: grad_placements={list(placements)} gives this rank a gradient of shape "
                f"{given.local_shape} for a local tensor of shape {self.local_shape} ({self!r}): cut the same dims"
            )
        return given

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.mesh

    @property
    def is_replicated(self) -> bool:
        return all(p.is_replicate() for p in self.placements)

    @property
    def local_bytes(self) -> int:
        return math.prod(self.local_shape) * self.dtype.itemsize

    def shards(self, dim: int, coordinate: Sequence[int] | None = None) -> list[AxisShard]:
        """Return the axes that shard ``dim``, outermost first: (placement, ranks on the axis, coordinate on it)."""
        where = self.coordinate if coordinate is None else coordinate
        return [
            (p, self.mesh.shape[axis], where[axis])
            for axis, p in enumerate(self.placements)
            if isinstance(p, Shard) and p.dim == dim
        ]

    def local_indices(self, dim: int) -> list[int]:
        """Return the global indices of ``dim`` that this rank holds, ascending within each block."""
        return indices_of(self.shape[dim], self.shards(dim))

    def local_offset(self, dim: int) -> int:
        """Say where this rank's shard of ``dim`` begins; only for dims with plain shards."""
        length, offset = self.shape[dim], 0
        for placement, parts, coordinate in self.shards(dim):
            assert type(placement) is Shard, f"{placement!r} holds more than one range of dim {dim}"
            offset += chunk_starts(length, parts)[coordinate]
            length = held_size(length, [(placement, parts, coordinate)])
        return offset

    def shape_at(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the local shape of the rank at ``coordinate``."""
        return tuple(held_size(n, self.shards(dim, coordinate)) for dim, n in enumerate(self.shape))

    def smallest_shard(self, dim: int) -> int:
        """Return the least that any rank holds of ``dim``: of a dim that is sharded twice it need not be the last
        rank's.
        """
        lengths = {self.shape[dim]}
        for placement, parts, _ in self.shards(dim):
            lengths = {held_size(n, [(placement, parts, at)]) for n in lengths for at in range(parts)}
        return min(lengths)

    @property
    def has_empty_shard(self) -> bool:
        """Whether some rank holds nothing."""
        return any(self.smallest_shard(dim) == 0 for dim in range(len(self.shape)))

    @property
    def has_thin_shard(self) -> bool:
        """Whether some rank holds at most one row of a longer dim, or nothing: its memory does not tell the order."""
        found: bool | None = self.variants.get("thin")
        if found is None:
            found = any(self.smallest_shard(dim) < min(2, size) for dim, size in enumerate(self.shape))
            self.variants["thin"] = found
        return found

    @property
    def has_free_order(self) -> bool:
        """Whether some rank's shard does not tell the order of the dims."""
        return self.has_thin_shard and (self.has_empty_shard or sum(size > 1 for size in self.shape) > 1)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} {self.layout}"

    @property
    def layout(self) -> str:
        """Short text of the placements on the mesh's axes, such as ``[dp:S(0), tp:R]``."""
        names = self.mesh.mesh_dim_names or [str(i) for i in range(self.mesh.ndim)]
        return "[" + ", ".join(f"{n}:{p!r}" for n, p in zip(names, self.placements, strict=True)) + "]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.mesh, self.placements, tuple(self.shape), self.dtype)


def _rebuild(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    return Spec.of(mesh, placements, shape, dtype)


Spec.__hash__ = object.__hash__  # type: ignore[method-assign]  # interned: identity is equality


def axes_in(mesh: DeviceMesh, root: DeviceMesh) -> list[int] | None:
    """Say where the axes of a sub-mesh are in ``root``; None if it was not taken from it."""
    if mesh._root is not root._root:
        return None
    axes = root._layout.axes
    return [axes.index(a) for a in mesh._layout.axes] if all(a in axes for a in mesh._layout.axes) else None


def on_root(spec: Spec, root: DeviceMesh) -> Spec | None:
    """Lay the tensor out on a mesh that contains its own, replicated on the other axes; None: it does not."""
    axes = axes_in(spec.mesh, root)
    if axes is None:
        return None
    placements: list[Placement] = [REPLICATE] * root.ndim
    for axis, placement in zip(axes, spec.placements, strict=True):
        placements[axis] = placement
    return Spec.of(root, placements, spec.shape, spec.dtype)
