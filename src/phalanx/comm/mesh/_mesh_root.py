"""Keeps what all meshes of one root share: its ranks, its names, and the table of groups; and checks arguments.

Owns ``MeshRoot``. A group is made when it is first asked for, by the ranks that are in it, and kept for the
root's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np
from torch import Tensor

from phalanx.comm.group._group import Group
from phalanx.comm.mesh._mesh_layout import MeshLayout, Positions

MeshRanks = Union[Tensor, Sequence[Any], "np.typing.NDArray[Any]", int]


class MeshRoot:
    """What all meshes cut from one root share."""

    __slots__ = ("flattened", "groups", "layout", "names", "parent", "position", "rank", "ranks")

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
        self.rank = rank
        self.parent = parent
        self.groups: dict[tuple[int, ...], Group] = {}
        self.flattened: dict[str, MeshLayout] = {}
        where = np.nonzero(ranks == rank)[0]
        self.position: int | None = int(where[0]) if len(where) else None

    def members(self, layout: MeshLayout) -> Positions:
        """Ranks of the copy of ``layout`` that this rank is in (of the first copy, if it is in none)."""
        return self.ranks[layout.members(self.position or 0)]

    def group(self, layout: MeshLayout) -> Group:
        """Return the group of this rank's copy of the 1-axis ``layout``."""
        if self.position is None:
            raise RuntimeError(f"rank {self.rank} is not part of this mesh of {len(self.ranks)} ranks: it has no group")
        ranks = tuple(self.members(layout).tolist())
        group = self.groups.get(ranks)
        if group is None:
            group = self.groups[ranks] = self._create(ranks)
        return group

    def _create(self, ranks: tuple[int, ...]) -> Group:
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
        if ranks == tuple(range(parent.size)):
            return parent
        group = parent.subgroup(ranks)
        assert group is not None, f"rank {self.rank} is one of {ranks} and must be a member of their group"
        return group


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
