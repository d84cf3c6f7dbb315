"""Groups of ranks and what they exchange: the only package that imports ``torch.distributed``."""

from __future__ import annotations

from phalanx.comm import faults, stores
from phalanx.comm._context import use_group
from phalanx.comm._group import Group
from phalanx.comm._init import current_group, init
from phalanx.comm._mesh import DeviceMesh, init_device_mesh
from phalanx.comm._observe import CommEvent, observe
from phalanx.comm._simulate import Simulation, simulate
from phalanx.comm._transport import ReduceOp, Transport, Work

__all__ = [
    "CommEvent",
    "DeviceMesh",
    "Group",
    "ReduceOp",
    "Simulation",
    "Transport",
    "Work",
    "current_group",
    "faults",
    "init",
    "init_device_mesh",
    "observe",
    "simulate",
    "stores",
    "use_group",
]
