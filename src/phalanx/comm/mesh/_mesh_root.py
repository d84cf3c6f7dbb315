"""Keeps what all meshes of one root share: its ranks, its names, and the table of groups; and checks arguments.

Owns ``MeshRoot``. A group is made when it is first asked for, by the ranks that are in it, and kept for the
root's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np
import torch.distributed as dist
from torch import Tensor

from phalanx._torch_private import TracingContext
from phalanx.comm.group._group import Group
from phalanx.comm.group._init import current_group
from phalanx.comm.mesh._backend_override import Override
from phalanx.comm.mesh._mesh_layout import Axis, MeshLayout, Positions

_AS_THE_MESH = Override()
MeshRanks = Union[Tensor, Sequence[Any], "np.typing.NDArray[Any]", int]


class MeshRoot:
    """What all meshes cut from one root share."""

    __slots__ = ("flattened", "given", "groups", "layout", "names", "overrides", "parent", "position", "rank", "ranks")

    def __init__(
        self,
        ranks: Positions,
        layout: MeshLayout,
        names: tuple[str, ...] | None,
        rank: int,
        parent: Group | None,
    ) -> None:
        self.ranks = ranks
        self.layout = layout
        self.names = names
        self.rank = int(rank)  # a plain one: it goes into files
        self.parent = parent
        self.groups: dict[tuple[tuple[int, ...], Override], Group] = {}
        self.given: dict[tuple[tuple[int, ...], Override], Group] = {}
        """Those of ``groups`` that the caller brought."""
        self.overrides: dict[Axis, Override] = {}
        self.flattened: dict[str, MeshLayout] = {}
        where = np.nonzero(ranks == rank)[0]
        self.position: int | None = int(where[0]) if len(where) else None

    def give(self, ranks: tuple[int, ...], group: Group) -> None:
        """Take the caller's group for these ranks."""
        self.groups[ranks, _AS_THE_MESH] = group
        if group is not self.parent:
            self.given[ranks, _AS_THE_MESH] = group

    def sends_like(self, other: MeshRoot, layout: MeshLayout) -> bool:
        """Return whether tensors on this layout of either are sent on the same groups, or such as the parent makes."""
        if self.parent is not other.parent or self.overrides != other.overrides:
            return False
        if not self.given and not other.given:
            return True
        for axis in range(len(layout.axes)):
            key = tuple(self.members(layout.select((axis,))).reshape(-1).tolist()), _AS_THE_MESH
            mine, theirs = self.given.get(key), other.given.get(key)
            if (mine or self.groups.get(key)) is not (theirs or other.groups.get(key)) and (mine or theirs):
                return False
        return True

    def override(self, overrides: Sequence[Override]) -> None:
        """Give each axis what is its own."""
        for axis, override in zip(self.layout.axes, overrides, strict=True):
            if override != _AS_THE_MESH:
                self.overrides[axis] = override

    def members(self, layout: MeshLayout) -> Positions:
        """Ranks of the copy of ``layout`` that this rank is in (of the first copy, if it is in none)."""
        return self.ranks[layout.members(self.position or 0)]

    def group(self, layout: MeshLayout) -> Group:
        """Return the group of this rank's copy of the 1-axis ``layout``."""
        if self.position is None:
            raise RuntimeError(f"rank {self.rank} is not part of this mesh of {len(self.ranks)} ranks: it has no group")
        ranks, override = tuple(self.members(layout).tolist()), self.overrides.get(layout.axes[0], _AS_THE_MESH)
        group = self.groups.get((ranks, override))
        if group is None:
            group = self.groups[ranks, override] = self._create(ranks, override)
        return group

    def _create(self, ranks: tuple[int, ...], override: Override) -> Group:
        parent = self.parent
        if parent is None:
            if not self.groups:
                raise RuntimeError(
                    f"this mesh came out of a file that rank {self.rank} wrote, where there was no group: it can be "
                    f"looked at, but nothing can be sent. Join a group (phalanx.init()) before you load the file"
                )
            raise RuntimeError(
                f"rank {self.rank}: this mesh was made from groups and has none for ranks {ranks}; "
                f"make it from a current group (comm.use_group) to get new axes"
            )
        if ranks == tuple(range(parent.size)) and override == _AS_THE_MESH:
            return parent
        if TracingContext.try_get() is not None:
            raise NotImplementedError(
                f"rank {self.rank}: the group of ranks {ranks} would be made while torch.compile traces, which other "
                f"ranks may not do now: call mesh.get_all_groups() on every rank before"
            )
        group = parent.subgroup(ranks, backend=override.backend, timeout=override.timeout)
        assert group is not None, f"rank {self.rank} is one of {ranks} and must be a member of their group"
        return group


def group_of(given: Any) -> Group:
    """Return the group that a caller brought; torch's default group stands for the current one, if that has its
    ranks."""
    group = Group.wrap(given)
    if group is given or given is not dist.group.WORLD:
        return group
    current = current_group()
    return current if (current.rank, current.ranks) == (group.rank, group.ranks) else group


def common_parent(groups: Sequence[Group]) -> Group | None:
    """Return the group that a mesh over ``groups`` belongs to: one that numbers its ranks as they do; None if none
    does."""
    root, own = groups[0].root, groups[0].ranks[groups[0].rank]
    try:
        current: Group | None = current_group()
    except RuntimeError:
        current = None
    if current is not None and current.root is not root:
        # torch numbers the ranks of these groups, and those of the current one in the same way
        same = all(group.numbered_by_torch for group in groups) and dist.is_initialized()
        if not same or (dist.get_rank(), dist.get_world_size()) != (current.rank, current.size):
            current = None
    if current is None and all(group.root is root for group in groups):
        current = root
    if current is None or current.ranks != tuple(range(groups[0].world_size)) or current.rank != own:
        return None
    return current


def rank_grid(mesh: MeshRanks) -> tuple[Positions, tuple[int, ...]]:
    """Return the ranks in a row, and the grid's shape."""
    array = np.asarray(mesh.detach().cpu().numpy() if isinstance(mesh, Tensor) else mesh)
    if array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"a mesh is a non-empty grid of integer ranks, got {array.dtype} of shape {array.shape}")
    ranks = array.reshape(-1).astype(np.int64)
    if len(np.unique(ranks)) != len(ranks) or int(ranks.min()) < 0:
        raise ValueError(f"mesh ranks must be unique and not negative, got {ranks.tolist()[:32]}")
    return ranks, tuple(array.shape)


def check_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if names is None:
        return None
    result = tuple(names)
    if len(set(result)) != len(result):
        raise RuntimeError(f"mesh_dim_names must be unique, got {result}")
    if len(result) != len(shape):
        raise RuntimeError(f"mesh_dim_names {result} must have one name per axis of shape {shape}")
    return result


def check_device_type(device_type: str) -> str:
    if not device_type.isalpha():
        raise RuntimeError(f"device_type must be a plain type such as 'cpu' or 'cuda', got {device_type!r}")
    return device_type
