"""Groups of ranks and what they exchange: the only package that imports ``torch.distributed``.

Names are loaded on first use: an agent needs the stores alone, and those before torch is there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.comm import faults as faults
    from phalanx.comm import stores as stores
    from phalanx.comm._context import use_group as use_group
    from phalanx.comm._group import Group as Group
    from phalanx.comm._init import current_group as current_group
    from phalanx.comm._init import init as init
    from phalanx.comm._mesh import DeviceMesh as DeviceMesh
    from phalanx.comm._mesh import init_device_mesh as init_device_mesh
    from phalanx.comm._observe import CommEvent as CommEvent
    from phalanx.comm._observe import observe as observe
    from phalanx.comm._simulate import Simulation as Simulation
    from phalanx.comm._simulate import simulate as simulate
    from phalanx.comm._transport import ReduceOp as ReduceOp
    from phalanx.comm._transport import Transport as Transport
    from phalanx.comm._transport import Work as Work

# Public name -> the module of this package that defines it; a package of its own stands for itself.
_HOMES = {
    "CommEvent": "_observe",
    "DeviceMesh": "_mesh",
    "Group": "_group",
    "ReduceOp": "_transport",
    "Simulation": "_simulate",
    "Transport": "_transport",
    "Work": "_transport",
    "current_group": "_init",
    "faults": "faults",
    "init": "_init",
    "init_device_mesh": "_mesh",
    "observe": "_observe",
    "simulate": "_simulate",
    "stores": "stores",
    "use_group": "_context",
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
