"""The mesh under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.comm import DeviceMesh, init_device_mesh

__all__ = [
    "DeviceMesh",
    "init_device_mesh",
]
