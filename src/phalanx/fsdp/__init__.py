"""Fully sharded training: each rank holds a part of parameters, gradients and optimizer state, all only while used."""

from __future__ import annotations

from phalanx.fsdp import context
from phalanx.fsdp._fully_shard import fully_shard
from phalanx.fsdp._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from phalanx.fsdp._policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from phalanx.fsdp._summary import unit_summary

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "context",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "unit_summary",
]
