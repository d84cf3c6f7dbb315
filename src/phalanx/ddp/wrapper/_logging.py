"""Collects the logging data of a wrapped module, and dumps the environment that matters to it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel

logger = logging.getLogger(__name__)

RELEVANT_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "OMP_NUM_THREADS"),
    *("PHALANX_STORE", "PHALANX_JOB", "PHALANX_GENERATION", "PHALANX_DEBUG"),
)


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Facts of construction, the current buckets, and times of the sampled steps (in nanoseconds)."""
    stats = ddp._stats
    reducer = ddp.reducer
    layout = [] if reducer is None else reducer.layout
    sizes = [] if reducer is None else [sum(reducer.params[i].nbytes for i in bucket) for bucket in layout]
    params = [] if reducer is None else reducer.params
    data: dict[str, Any] = {
        "module_name": type(ddp.module).__name__,
        "rank": ddp.group.rank,
        "world_size": ddp.group.size,
        "backend_name": ddp.group.backend,
        "generation": ddp.group.generation,
        "reduce": ddp.reduce,
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(param.nbytes for param in params),
        "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
        "bucket_cap_bytes": ddp._caps.sizes[-1] if reducer is None else reducer.plan.caps.sizes[-1],
        "bucket_sizes": ", ".join(map(str, sizes)),
        "num_buckets_reduced": len(layout),
        "has_rebuilt_buckets": stats.rebuilds > 0,
        "num_bucket_rebuilds": stats.rebuilds,
        "broadcast_buffers": ddp.forward_sync_buffers,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "has_sync_bn": any(isinstance(part, nn.SyncBatchNorm) for part in ddp.module.modules()),
        "comm_hook": ddp._comm_hooks[0][0].__qualname__ if ddp._comm_hooks else "",
        "iteration": stats.steps,
        "num_sampled_iterations": stats.sampled,
        "unused_parameter_size": sum(p.nbytes for m, p in _named(ddp) if m in set(stats.unused)),
        "unused_parameters": ", ".join(stats.unused),
        "can_set_static_graph": stats.steps > 0 and not stats.unused_changed,
        "error": stats.error,
        "torch_version": torch.__version__,
    }
    names = {
        "forward_compute": "forward_compute_time",
        "backward_compute": "backward_compute_time",
        "communication": "backward_comm_time",
        "overlap": "backward_compute_comm_overlap_time",
    }
    for ours, name in names.items():
        data[name] = round(getattr(stats.latest, ours) * 1e9)
        data[f"avg_{name}"] = round(stats.average(ours) * 1e9)
    return data


def _named(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    return [] if ddp.reducer is None else [(m.name, m.part) for m in ddp.reducer.members]


def dump_environment() -> str:
    """Print, and return, the variables that decide how ranks find each other and talk."""
    text = _environment()
    print(text)
    return text


def log_environment() -> None:
    """Log what the environment says, if anyone listens at debug level."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", _environment())


def _environment() -> str:
    return "\n".join(f"env:{name}={os.environ.get(name, 'N/A')}" for name in RELEVANT_VARIABLES)
