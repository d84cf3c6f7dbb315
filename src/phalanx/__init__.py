"""Phalanx: PyTorch training that goes on when machines fail.

Names are loaded on first use, so that ``import phalanx`` stays quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from phalanx import _torch_hook

__version__ = "0.1.0"

# Public name -> the package that defines it.
_HOMES = {
    "DTensor": "phalanx.tensor",
    "DeviceMesh": "phalanx.comm",
    "DistributedDataParallel": "phalanx.ddp",
    "ElasticBatchSampler": "phalanx.data",
    "ElasticDistributedSampler": "phalanx.data",
    "Group": "phalanx.comm",
    "Job": "phalanx.elastic",
    "init": "phalanx.comm",
    "init_device_mesh": "phalanx.comm",
    "simulate": "phalanx.comm",
}
_PACKAGES = frozenset(
    {"comm", "data", "ddp", "elastic", "errors", "launch", "membership", "shard", "tensor", "world"}
)

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return import_module(f"phalanx.{name}")
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})


_torch_hook.install()
