"""Fully sharded training: each rank holds a part of parameters, gradients and optimizer state, all only while used."""

from __future__ import annotations

from phalanx.fsdp import context
from phalanx.fsdp._digest import ModelDigest, model_digest
from phalanx.fsdp._fully_shard import fully_shard
from phalanx.fsdp._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from phalanx.fsdp._policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from phalanx.tensor.debug import layout_summary

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ModelDigest",
    "OffloadPolicy",
    "UnshardHandle",
    "context",
    "fully_shard",
    "layout_summary",
    "model_digest",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
