"""Along which mesh axes parameters are sharded and replicated, and what layout a parameter gets from that.

Owns ``DataParallelAxes`` (the axes and their groups) and the layout of a sharded parameter: its own placements, if
tensor parallelism has distributed it already, together with those of ``fully_shard``. Where both shard one dim, tensor
parallelism comes first: each of its shards is sharded again (``StridedShard``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from phalanx.comm import DeviceMesh, Group
from phalanx.fsdp._policies import DataParallelMeshDims
from phalanx.tensor import DTensor, Placement, Replicate, Shard, StridedShard
from phalanx.tensor.layout._placement import chunk_sizes
from phalanx.tensor.layout._spec import Spec, axes_in


@dataclass(frozen=True)
class DataParallelAxes:
    """The mesh of data parallelism: one axis that shards, one that replicates, or both (replicate first)."""

    mesh: DeviceMesh
    shards: bool = True
    replicates: bool = False

    @property
    def shard_group(self) -> Group:
        if not self.shards:
            alone = self.mesh.get_group(0).subgroup([self.mesh.get_local_rank(0)])
            assert alone is not None, "this rank is in it"
            return alone
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> Group | None:
        return self.mesh.get_group(0) if self.replicates else None

    def placements(self, shard: Placement) -> list[Placement]:
        return [*([Replicate()] if self.replicates else []), *([shard] if self.shards else [])]


def block_group(group: Group, size: int) -> Group:
    """Return the group of this rank's block of ``size`` neighbours; one for all units that ask for it."""
    blocks = _blocks.setdefault(group, {})
    if size not in blocks:
        first = group.rank // size * size
        block = group.subgroup(range(first, first + size))
        assert block is not None, "this rank is in it"
        blocks[size] = block
    return blocks[size]


_blocks: WeakKeyDictionary[Group, dict[int, Group]] = WeakKeyDictionary()


def axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallelAxes:
    """Find the axes that shard and replicate: of a 1-d mesh, of a 2-d mesh (replicate, shard), or by their names."""
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not part of {mesh!r}: call fully_shard on the ranks of the mesh only"
        )
    if dims is None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard got {mesh!r} of {mesh.ndim} axes; expected one axis (shard) or two (replicate, shard): "
                f"take those of data parallelism, mesh['dp'] or mesh['replicate', 'shard'], or pass dp_mesh_dims="
            )
        return DataParallelAxes(mesh, replicates=mesh.ndim == 2)
    parts = [_one_axis(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    joined = parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
    return DataParallelAxes(joined, bool(dims.shard_names), bool(dims.replicate_names))


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    found = mesh[names]
    return found if found.ndim == 1 else found._flatten()


def sharded_spec(axes: DataParallelAxes, parameter: Tensor, dim: int, name: str) -> tuple[Spec, Spec | None]:
    """Return the layout of the parameter between uses, and inside forward (None: it is a plain tensor there)."""
    if not isinstance(parameter, DTensor):
        return Spec.of(axes.mesh, axes.placements(Shard(dim)), parameter.shape, parameter.dtype), None
    own = _without(axes, parameter._spec, name)
    if own is None:
        return Spec.of(axes.mesh, axes.placements(Shard(dim)), parameter.shape, parameter.dtype), None
    inside = math.prod(
        own.mesh.shape[axis] for axis, p in enumerate(own.placements) if isinstance(p, Shard) and p.dim == dim
    )
    shard: Placement = Shard(dim) if inside == 1 else StridedShard(dim, split_factor=inside)
    try:
        mesh = DeviceMesh._concatenate([axes.mesh, own.mesh])
    except (RuntimeError, KeyError) as error:
        raise ValueError(
            f"fully_shard on {axes.mesh!r} of parameter {name!r}, which is distributed as {own!r} on {own.mesh!r}: "
            f"expected two parts of one mesh, that of data parallelism first ({error.args[0]})"
        ) from error
    spec = Spec.of(mesh, [*axes.placements(shard), *own.placements], own.shape, own.dtype)
    wanted = _local_shape(axes, own, dim)
    if spec.local_shape != wanted:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(own.shape)} is sharded as {own!r} first, then dim {dim} on "
            f"{axes.mesh!r}: this rank would hold {wanted}, which no placements describe ({spec!r} is "
            f"{spec.local_shape}). Choose sizes that divide evenly, or another dim by shard_placement_fn="
        )
    return spec, own


def _local_shape(axes: DataParallelAxes, own: Spec, dim: int) -> tuple[int, ...]:
    shape = list(own.local_shape)
    if axes.shards:
        group = axes.shard_group
        shape[dim] = chunk_sizes(shape[dim], group.size)[group.rank]
    return tuple(shape)


def _without(axes: DataParallelAxes, spec: Spec, name: str) -> Spec | None:
    """Return the layout on the axes that data parallelism leaves; None if it leaves none."""
    among = axes_in(axes.mesh, spec.mesh)
    if among is None:
        return spec
    for axis in among:
        if not spec.placements[axis].is_replicate():
            raise ValueError(
                f"parameter {name!r} is distributed as {spec!r} already; expected Replicate() on the axes that "
                f"fully_shard is to use ({axes.mesh!r})"
            )
    rest = [axis for axis in range(spec.mesh.ndim) if axis not in among]
    if not rest:
        return None
    names: Any = spec.mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"parameter {name!r} is on {spec.mesh!r}, whose axes have no names: give mesh_dim_names")
    mesh = spec.mesh[tuple(names[axis] for axis in rest)]
    return Spec.of(mesh, [spec.placements[axis] for axis in rest], spec.shape, spec.dtype)
