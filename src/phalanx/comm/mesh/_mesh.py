"""DeviceMesh: lays the ranks of a group out on named axes, with one group per axis, made when it is first asked for.

Owns ``DeviceMesh`` and ``init_device_mesh``. The index maths is in ``_mesh_layout.py``; the groups are
``comm.Group``.

Invariants:
- A mesh belongs to the group that was current when it was built (``comm.current_group()``); its ranks are
  ranks of that group. In a simulated rank that is the simulated group.
- Sub-meshes share the root's ranks and its table of groups; a list of ranks has at most one group.
- Nothing is created before ``get_group`` / ``get_all_groups`` asks for it. Every rank of the root asks for
  the same axes in the same order, as with any collective.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx._without_modes import without_user_modes
from phalanx.comm.group._group import Group
from phalanx.comm.group._init import has_current_group, joined_group
from phalanx.comm.mesh import _torch_mesh
from phalanx.comm.mesh._accelerator import select_device
from phalanx.comm.mesh._backend_override import parse_overrides
from phalanx.comm.mesh._mesh_layout import MeshLayout, is_in_root_order
from phalanx.comm.mesh._mesh_root import (
    MeshRanks,
    MeshRoot,
    check_device_type,
    check_names,
    common_parent,
    group_of,
    rank_grid,
)
from phalanx.world import launched_local_rank

# By their identity: two meshes of torch's are equal although their groups, of an earlier default group, have ended.
_converted: dict[int, DeviceMesh] = {}
_entered = threading.local()  # the meshes this thread (one simulated rank, or the process) has entered by ``with``


class DeviceMesh:
    """Ranks on an n-dimensional grid with optional axis names.

    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))   # doctest: +SKIP
    >>> mesh["tp"].size(), mesh.get_local_rank("tp"), mesh.get_group("dp")    # doctest: +SKIP
    """

    # Attributes, no properties: Dynamo reads them in compiled functions, and fails at properties of what graphs hold.
    __slots__ = {
        "_coordinate": None,
        "_groups": None,
        "_hash": None,
        "_layout": None,
        "_root": None,
        "device_type": "Where its ranks compute, such as ``cpu``.",
        "mesh": "The ranks as an int tensor of the mesh's shape (this rank's copy, for a sub-mesh).",
        "mesh_dim_names": "The names of the axes, or None.",
        "ndim": "How many axes it has.",
        "shape": "The number of ranks along each axis.",
    }

    def __init__(
        self,
        device_type: str,
        mesh: MeshRanks,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, Any] | Sequence[Any] | None = None,
    ) -> None:
        ranks, shape = rank_grid(mesh)
        names = check_names(mesh_dim_names, shape)
        overrides = parse_overrides(backend_override, len(shape), names)
        check_device_type(device_type)
        parent = joined_group()
        if len(ranks) > parent.size:
            raise RuntimeError(
                f"rank {parent.rank}: a mesh of shape {shape} needs {len(ranks)} ranks, "
                f"but the current group has {parent.size}"
            )
        if len(ranks) and int(ranks.max()) >= parent.size:
            raise ValueError(f"mesh names rank {int(ranks.max())}, but the current group has {parent.size} ranks")
        if parent.backend != "threads":  # whose ranks share one process
            select_device(device_type, parent.rank, parent.size, launched_local_rank())
        root = MeshRoot(ranks, MeshLayout.of_shape(shape), names, parent.rank, parent)
        root.override(overrides)
        self._set(root, root.layout, names, device_type)

    def _set(self, root: MeshRoot, layout: MeshLayout, names: tuple[str, ...] | None, device_type: str) -> DeviceMesh:
        self._root = root
        self._layout = layout
        self.mesh_dim_names = names
        self.device_type = device_type
        self.shape: tuple[int, ...] = layout.shape
        self.ndim = len(layout.shape)
        self._coordinate = None if root.position is None else layout.coordinate(root.position)
        self._groups: list[Group | None] = [None] * len(layout.axes)
        with without_user_modes():  # a slice may be made while torch.compile traces
            self.mesh: Tensor = torch.from_numpy(root.members(layout).astype(np.int32))
        self._hash: int | None = None
        return self

    def _derive(self, layout: MeshLayout, names: tuple[str, ...] | None) -> DeviceMesh:
        return DeviceMesh.__new__(DeviceMesh)._set(self._root, layout, names, self.device_type)

    @classmethod
    def from_group(
        cls,
        group: Any,  # Group or c10d ProcessGroup, or a list of them
        device_type: str,
        mesh: MeshRanks | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return a mesh over groups that exist already: one (1-d mesh), or one per axis together with the grid of
        ranks.
        """
        single = not isinstance(group, (list, tuple))
        given: list[Any] = [group] if single else list(group)
        groups = [group_of(one) for one in given]
        if not groups:
            raise ValueError("from_group needs at least one group")
        if mesh is None:
            if not single:
                raise ValueError(f"from_group with a list of {len(groups)} groups needs mesh=, the grid of ranks")
            mesh = list(groups[0].ranks)
        ranks, shape = rank_grid(mesh)
        if len(shape) != len(groups):
            raise ValueError(f"from_group got {len(groups)} groups for a mesh of {len(shape)} axes (shape {shape})")
        if single and tuple(ranks.tolist()) != tuple(groups[0].ranks):
            raise ValueError(f"mesh {ranks.tolist()} differs from the group's ranks {list(groups[0].ranks)}")
        names = check_names(mesh_dim_names, shape)
        rank = groups[0].ranks[groups[0].rank]
        root = MeshRoot(ranks, MeshLayout.of_shape(shape), names, rank, common_parent(groups))
        for index, one in enumerate(groups):
            members = tuple(root.members(root.layout.select((index,))).tolist())
            if members != tuple(one.ranks):
                raise ValueError(f"rank {rank}: axis {index} of the mesh holds ranks {members}, its group {one.ranks}")
            root.give(members, one)
        return cls.__new__(cls)._set(root, root.layout, names, check_device_type(device_type))

    @classmethod
    def from_torch(cls, mesh: Any) -> DeviceMesh:
        """Return a mesh over the groups of torch's ``DeviceMesh``; of a slice of one, the slice."""
        root, names = mesh._get_root_mesh(), mesh.mesh_dim_names
        if mesh is not root and set(names or ("",)) <= set(root.mesh_dim_names or ()):
            return cls.from_torch(root)[names]
        groups = mesh.get_all_groups()
        given = groups if len(groups) > 1 else groups[0]
        return cls.from_group(given, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)

    def to_torch(self) -> Any:
        """Return torch's ``DeviceMesh`` over the same groups, for libraries that need that class; of a slice, a slice.

        >>> torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"].to_torch())   # doctest: +SKIP

        Collective over the ranks of the whole mesh that this one was cut from.
        """
        if not self._is_root() and set(self.mesh_dim_names or ("",)) <= set(self._root.names or ()):
            return self._get_root_mesh().to_torch()[self.mesh_dim_names]
        return _torch_mesh.to_torch(self)

    # ---- what it is

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, in all or along one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self._axis(mesh_dim)]

    def get_rank(self) -> int:
        """Return this rank in the group the mesh was built on."""
        return self._root.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return where this rank sits; None if it is not part of the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's place along one axis."""
        axis = self._only_axis("get_local_rank") if mesh_dim is None else self._axis(mesh_dim)
        if self._coordinate is None:
            raise RuntimeError(f"rank {self._root.rank} is not part of {self!r}")
        return self._coordinate[axis]

    # ---- groups

    def get_group(self, mesh_dim: int | str | None = None) -> Group:
        """Return the group of the ranks that share this rank's place on all other axes; made at the first call."""
        if (
            isinstance(mesh_dim, str)
            and mesh_dim in self._root.flattened
            and mesh_dim not in (self.mesh_dim_names or ())
        ):
            return self._root.group(self._root.flattened[mesh_dim])
        axis = self._only_axis("get_group") if mesh_dim is None else self._axis(mesh_dim)
        group = self._groups[axis]
        if group is None:
            group = self._groups[axis] = self._root.group(self._layout.select((axis,)))
        return group

    def get_all_groups(self) -> list[Group]:
        return [self.get_group(axis) for axis in range(self.ndim)]

    # ---- cutting and joining axes

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of the named axes, in the order of the root (also axes made by ``_flatten``)."""
        if self.mesh_dim_names is None:
            raise RuntimeError(f"{self!r} has no axis names and cannot be sliced: give mesh_dim_names")
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if wanted == self.mesh_dim_names:
            return self
        if len(set(wanted)) != len(wanted):
            raise RuntimeError(f"mesh axes {wanted} name one axis twice")
        flattened = self._root.flattened if self._is_root() else {}
        parts = []
        for name in wanted:
            if name in self.mesh_dim_names:
                parts.append(self._layout.axes[self.mesh_dim_names.index(name)])
            elif name in flattened:
                parts.append(flattened[name].axes[0])
            else:
                raise KeyError(f"mesh has no axis {name!r}; its axes are {list(self.mesh_dim_names) + list(flattened)}")
        layout = MeshLayout(tuple(parts))
        if not is_in_root_order(layout):
            raise KeyError(f"mesh axes {wanted} overlap or are out of order; the mesh's order is {self.mesh_dim_names}")
        return self._derive(layout, wanted)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """Return all axes as one, which the root mesh can be sliced by afterwards; called ``a_b`` unless named."""
        if not self.mesh_dim_names:
            raise RuntimeError(f"{self!r} has no axis names and cannot be flattened: give mesh_dim_names")
        name = "_".join(self.mesh_dim_names) if mesh_dim_name is None else mesh_dim_name
        if self.ndim == 1 and name == self.mesh_dim_names[0]:
            return self
        layout = self._layout.flatten()
        if name in (self._root.names or ()):
            raise ValueError(f"{name!r} is an axis of the root mesh already; choose another mesh_dim_name")
        known = self._root.flattened.setdefault(name, layout)
        if known != layout:
            raise ValueError(f"{name!r} names another flattened axis already; choose another mesh_dim_name")
        if backend_override is not None:
            self._root.overrides[layout.axes[0]] = parse_overrides([backend_override], 1, None)[0]
        return self._derive(layout, (name,))

    def _unflatten(self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """Return one axis cut into several, slowest first. The result is sliced by its own names."""
        if len(mesh_sizes) != len(mesh_dim_names):
            raise RuntimeError(f"_unflatten got {len(mesh_sizes)} sizes but {len(mesh_dim_names)} names")
        axis = self._axis(dim)
        layout = self._layout.unflatten(axis, tuple(mesh_sizes))
        names = None
        if self.mesh_dim_names is not None:
            names = (*self.mesh_dim_names[:axis], *mesh_dim_names, *self.mesh_dim_names[axis + 1 :])
            check_names(names, layout.shape)
        return self._derive(layout, names)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return one mesh with the axes of several meshes of the same root."""
        if len({id(mesh._root) for mesh in device_mesh_list}) != 1:
            raise RuntimeError("_concatenate needs meshes cut from one root")
        names = [name for mesh in device_mesh_list for name in (mesh.mesh_dim_names or ())]
        layout = MeshLayout(tuple(axis for mesh in device_mesh_list for axis in mesh._layout.axes))
        if not is_in_root_order(layout):
            raise KeyError(f"mesh axes {tuple(names)} overlap or are out of order")
        return device_mesh_list[0]._derive(layout, check_names(names or None, layout.shape))

    def _get_root_mesh(self) -> DeviceMesh:
        """Return the mesh that this one was cut from (itself, if from none)."""
        root = self._root
        return self if self._is_root() else self._derive(root.layout, root.names)

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self._axis(mesh_dim_name)

    def _get_root_mesh_dim(self) -> int | None:
        """Return the root's index of this 1-d sub-mesh's axis; None if it is no axis of the root."""
        axes = self._root.layout.axes
        return axes.index(self._layout.axes[0]) if self.ndim == 1 and self._layout.axes[0] in axes else None

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[Tensor]:
        """Return the ranks of every copy of one axis, this rank's and all others'."""
        axis = self._layout.select((self._axis(mesh_dim_name),))
        rows = self._root.ranks[axis.copies(len(self._root.ranks))]
        return [torch.from_numpy(row.astype(np.int32)) for row in rows]

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self._coordinate is not None

    # ---- with mesh:

    def __enter__(self) -> DeviceMesh:
        stack = _entered.__dict__.setdefault("stack", [])
        stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.stack.pop()

    # ---- as a value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        if self.mesh_dim_names != other.mesh_dim_names or self.device_type != other.device_type:
            return False
        if self._root is other._root:
            return self._layout == other._layout
        return (
            self.shape == other.shape
            and np.array_equal(self._root.members(self._layout), other._root.members(other._layout))
            and self._root.rank == other._root.rank
            and self._root.sends_like(other._root, self._layout)
        )

    def __hash__(self) -> int:
        if self._hash is None:
            ranks = self._root.members(self._layout).tobytes()
            self._hash = hash((ranks, self.shape, self.mesh_dim_names, self.device_type, id(self._root.parent)))
        return self._hash

    def __repr__(self) -> str:
        names = self.mesh_dim_names
        axes = (f"{names[i]}={size}" if names else str(size) for i, size in enumerate(self.shape))
        return f"DeviceMesh(({', '.join(axes)}), {self.device_type!r}, stride={self._layout.strides})"

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self  # a mesh names live groups: a copy of a module stays on the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        root = self._root
        if root.given:
            raise TypeError(f"{self!r} was made from groups; groups cannot be pickled")
        grid = root.ranks.reshape(root.layout.shape).tolist()
        flattened = tuple((name, layout) for name, layout in root.flattened.items())
        return _rebuild, (self.device_type, grid, root.names, self._layout, self.mesh_dim_names, flattened, root.rank)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copying, pickling and the like, which go on without
            raise AttributeError(name)
        raise AttributeError(
            f"phalanx's DeviceMesh has no {name!r}; to a library that needs torch's own mesh pass mesh.to_torch()"
        )

    # ---- inside

    def _is_root(self) -> bool:
        return self._layout is self._root.layout

    def _axis(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, str):
            if self.mesh_dim_names is None or mesh_dim not in self.mesh_dim_names:
                raise KeyError(f"mesh has no axis {mesh_dim!r}; its axes are {self.mesh_dim_names}")
            return self.mesh_dim_names.index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"mesh axis {mesh_dim} is out of range for {self!r}")
        return mesh_dim % self.ndim

    def _only_axis(self, call: str) -> int:
        if self.ndim != 1:
            raise RuntimeError(
                f"{call}() on a mesh of {self.ndim} axes needs mesh_dim: which axis of {self.mesh_dim_names}?"
            )
        return 0


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return all ranks of the current group on a grid of ``mesh_shape``, row-major.

    Without a current group the process joins the one that its launcher's environment names (``phalanx.init()``), as
    with torch's. ``backend_override`` gives axes (by index or name) a backend or timeout of their own.

    >>> init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))   # doctest: +SKIP
    DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))

    ``RuntimeError`` if the names do not fit the shape or the group is smaller than the mesh, ``ValueError`` if there
    is neither a group nor an environment that names one.
    """
    shape = tuple(mesh_shape)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, grid, mesh_dim_names=mesh_dim_names, backend_override=backend_override)


def as_mesh(mesh: Any) -> Any:
    """Return ``mesh``, or ours over the groups of a mesh of torch's."""
    if not _torch_mesh.is_torch_mesh(mesh):
        return mesh
    key = id(mesh)
    if key not in _converted:
        _converted[key] = DeviceMesh.from_torch(mesh)
        weakref.finalize(mesh, _converted.pop, key, None).atexit = False
    return _converted[key]


def current_mesh() -> DeviceMesh | None:
    """Return the innermost mesh entered by ``with mesh:`` on this rank."""
    stack = getattr(_entered, "stack", None)
    return stack[-1] if stack else None


def _rebuild(
    device_type: str,
    grid: list[Any],
    root_names: tuple[str, ...] | None,
    layout: MeshLayout,
    names: tuple[str, ...] | None,
    flattened: tuple[tuple[str, MeshLayout], ...],
    saved_on: int | None = None,
) -> DeviceMesh:
    if saved_on is not None and not has_current_group():  # to look at what a file holds
        ranks, shape = rank_grid(grid)
        made = MeshRoot(ranks, MeshLayout.of_shape(shape), check_names(root_names, shape), saved_on, None)
        root = DeviceMesh.__new__(DeviceMesh)._set(made, made.layout, made.names, check_device_type(device_type))
    else:
        root = DeviceMesh(device_type, grid, mesh_dim_names=root_names)
    root._root.flattened.update(flattened)
    return root if layout == root._layout else root._derive(layout, names)


_torch_mesh.teach_torch(DeviceMesh)
