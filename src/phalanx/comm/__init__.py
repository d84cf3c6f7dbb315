"""Lets groups of ranks exchange tensors and values: the only package that imports ``torch.distributed``.

Names are loaded on first use: an agent needs the stores alone, and those before torch is there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.comm import faults as faults
    from phalanx.comm import stores as stores
    from phalanx.comm.group._context import use_group as use_group
    from phalanx.comm.group._group import Group as Group
    from phalanx.comm.group._init import current_group as current_group
    from phalanx.comm.group._init import init as init
    from phalanx.comm.group._observe import CommEvent as CommEvent
    from phalanx.comm.group._observe import observe as observe
    from phalanx.comm.mesh._mesh import DeviceMesh as DeviceMesh
    from phalanx.comm.mesh._mesh import init_device_mesh as init_device_mesh
    from phalanx.comm.simulation._simulate import Simulation as Simulation
    from phalanx.comm.simulation._simulate import simulate as simulate
    from phalanx.comm.transports._interface import ReduceOp as ReduceOp
    from phalanx.comm.transports._interface import Transport as Transport
    from phalanx.comm.transports._interface import Work as Work

# Public name -> the module of this package that defines it; a package of its own stands for itself.
_HOMES = {
    "CommEvent": "group._observe",
    "DeviceMesh": "mesh._mesh",
    "Group": "group._group",
    "ReduceOp": "transports._interface",
    "Simulation": "simulation._simulate",
    "Transport": "transports._interface",
    "Work": "transports._interface",
    "current_group": "group._init",
    "faults": "faults",
    "init": "group._init",
    "init_device_mesh": "mesh._mesh",
    "observe": "group._observe",
    "simulate": "simulation._simulate",
    "stores": "stores",
    "use_group": "group._context",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a checker would take every name from it, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'phalanx.comm' has no attribute {name!r}")
        home = import_module(f"phalanx.comm.{_HOMES[name]}")
        value = home if _HOMES[name] == name else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
