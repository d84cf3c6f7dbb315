"""Converts device meshes to torch's own and back, for libraries that know the other kind only.

Owns the one place that touches ``torch.distributed.device_mesh``, when used. Both kinds share the groups: what is sent
on one mesh is sent on the groups of the other. Also lets torch's functional collectives and its ``fully_shard`` take a
mesh of ours, and its DTensor say what to pass in place of one, where it would go wrong later.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx._after_import import after_import

if TYPE_CHECKING:
    from phalanx.comm.mesh._mesh import DeviceMesh

_FUNCTIONAL = "torch.distributed._functional_collectives"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"


def to_torch(mesh: DeviceMesh) -> Any:
    """Return torch's ``DeviceMesh`` over the groups of ``mesh``; every rank of it calls this, as it makes groups."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh  # start-up: only those who convert need it

    groups = mesh.get_all_groups()
    if not dist.is_initialized() or not all(dist.get_rank(group) == group.rank for group in groups):
        raise RuntimeError(
            f"rank {mesh.get_rank()}: torch has no default process group with the ranks of {mesh!r}, which a mesh of "
            f"torch's is numbered by; make the mesh after phalanx.init() (simulated ranks cannot have one)"
        )
    # Several axes have names in torch's; one need not.
    names = mesh.mesh_dim_names or (tuple(f"dim_{axis}" for axis in range(mesh.ndim)) if mesh.ndim > 1 else None)
    given = groups if mesh.ndim > 1 else groups[0]
    return TorchMesh.from_group(given, mesh.device_type, mesh.mesh, mesh_dim_names=names)  # type: ignore[arg-type]


def is_torch_mesh(value: object) -> bool:
    """Return whether it is torch's; nothing is imported for that, since its module is there if it is."""
    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    return kind is not None and isinstance(value, kind)


def teach_torch(kind: type[DeviceMesh]) -> None:
    """Let torch's functional collectives and ``fully_shard`` take ``kind``, and its DTensor refuse it: now or later,
    when they are imported."""
    for name, wrap in ((_FUNCTIONAL, _wrap_resolver), (_SPEC, _wrap_spec), (_FULLY_SHARD, _wrap_fully_shard)):
        module, action = sys.modules.get(name), functools.partial(wrap, kind)
        if module is None:
            after_import(name, action)
        else:
            action(module)


def _wrap_resolver(kind: type[DeviceMesh], module: Any) -> None:
    plain = module._resolve_group
    if hasattr(plain, "_phalanx"):
        return

    @functools.wraps(plain)
    def resolve_group(group: Any, *args: Any, **options: Any) -> Any:
        if isinstance(group, kind):
            group = group.get_group()
        elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], kind):
            group = group[0].get_group(group[1])
        return plain(group, *args, **options)

    resolve_group._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    module._resolve_group = resolve_group


def _wrap_spec(kind: type[DeviceMesh], module: Any) -> None:
    plain = module.DTensorSpec.__post_init__
    if hasattr(plain, "_phalanx"):
        return

    @functools.wraps(plain)
    def post_init(self: Any) -> None:
        if isinstance(self.mesh, kind):
            raise TypeError(
                f"rank {self.mesh.get_rank()}: torch's DTensor got {self.mesh!r}, which is phalanx's; expected torch's "
                f"own mesh: pass mesh.to_torch(), or take DTensor and its functions from phalanx.tensor"
            )
        plain(self)

    post_init._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    module.DTensorSpec.__post_init__ = post_init


def _wrap_fully_shard(kind: type[DeviceMesh], module: Any) -> None:
    """Exchange what is called inside of torch's decorator: its user may have bound the name before we came."""
    decorated = module.fully_shard
    plain = decorated.__wrapped__
    if hasattr(plain, "_phalanx"):
        return

    @functools.wraps(plain)
    def fully_shard(*args: Any, mesh: Any = None, **options: Any) -> Any:
        return plain(*args, mesh=mesh.to_torch() if isinstance(mesh, kind) else mesh, **options)

    fully_shard._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    for cell in decorated.__closure__:
        if cell.cell_contents is plain:
            cell.cell_contents = fully_shard
    decorated.__wrapped__ = fully_shard
