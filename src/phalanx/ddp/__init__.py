"""Trains data-parallel: every rank computes on its own data, all ranks get the same gradients."""

from __future__ import annotations

from phalanx._nested_values import find_tensors as _find_tensors
from phalanx.ddp import hooks
from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.reducer._reducer import Reducer, ReducerOptions
from phalanx.ddp.wrapper._constructor_arguments import MixedPrecision as _MixedPrecision
from phalanx.ddp.wrapper._join import Join, Joinable, JoinHook
from phalanx.ddp.wrapper._join_hook import DDPJoinHook as _DDPJoinHook
from phalanx.ddp.wrapper._logging import dump_environment as _dump_DDP_relevant_env_vars
from phalanx.ddp.wrapper._module_buffers import BufferCommHookLocation as _BufferCommHookLocation
from phalanx.ddp.wrapper._replicas import ReplicaDrift, ReplicaMismatch
from phalanx.ddp.wrapper._wrapper import DistributedDataParallel

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "Join",
    "JoinHook",
    "Joinable",
    "Reducer",
    "ReducerOptions",
    "ReplicaDrift",
    "ReplicaMismatch",
    "_BufferCommHookLocation",
    "_DDPJoinHook",
    "_MixedPrecision",
    "_dump_DDP_relevant_env_vars",
    "_find_tensors",
    "hooks",
]
