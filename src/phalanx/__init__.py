"""Phalanx: PyTorch training that goes on when machines fail.

Names are loaded on first use, so that ``import phalanx`` stays quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import _torch_hook

if TYPE_CHECKING:
    from phalanx import checkpoint as checkpoint
    from phalanx import comm as comm
    from phalanx import data as data
    from phalanx import ddp as ddp
    from phalanx import elastic as elastic
    from phalanx import errors as errors
    from phalanx import fsdp as fsdp
    from phalanx import launch as launch
    from phalanx import membership as membership
    from phalanx import preemption as preemption
    from phalanx import shard as shard
    from phalanx import tensor as tensor
    from phalanx import world as world
    from phalanx.comm import DeviceMesh as DeviceMesh
    from phalanx.comm import Group as Group
    from phalanx.comm import init as init
    from phalanx.comm import init_device_mesh as init_device_mesh
    from phalanx.comm import simulate as simulate
    from phalanx.data import ElasticBatchSampler as ElasticBatchSampler
    from phalanx.data import ElasticDistributedSampler as ElasticDistributedSampler
    from phalanx.ddp import DistributedDataParallel as DistributedDataParallel
    from phalanx.elastic import Job as Job
    from phalanx.errors import DoNotRetry as DoNotRetry
    from phalanx.tensor import DTensor as DTensor
    from phalanx.tensor.debug import comm_contract as comm_contract

__version__ = "0.1.0"

# Public name -> the package that defines it.
_HOMES = {
    "DTensor": "phalanx.tensor",
    "DeviceMesh": "phalanx.comm",
    "DoNotRetry": "phalanx.errors",
    "DistributedDataParallel": "phalanx.ddp",
    "ElasticBatchSampler": "phalanx.data",
    "ElasticDistributedSampler": "phalanx.data",
    "Group": "phalanx.comm",
    "Job": "phalanx.elastic",
    "comm_contract": "phalanx.tensor.debug",
    "init": "phalanx.comm",
    "init_device_mesh": "phalanx.comm",
    "simulate": "phalanx.comm",
}
_PACKAGES = frozenset(
    {
        *("checkpoint", "comm", "data", "ddp", "elastic", "errors", "fsdp", "launch"),
        *("membership", "preemption", "shard", "tensor", "world"),
    }
)

__all__ = ["__version__", *sorted(_HOMES)]


if not TYPE_CHECKING:  # a checker would take every name from it, misspelt ones too

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
