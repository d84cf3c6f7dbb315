"""Checks the constructor's arguments, once, before anything is built. Pure except for warnings."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx._devices import is_host
from phalanx.ddp.buckets._local_tensors import check_trainable
from phalanx.ddp.buckets._parameters import NamedParameter

REDUCTIONS = ("mean", "sum", "weighted")


@dataclass(frozen=True)
class MixedPrecision:
    """dtypes for computing, reducing and buffers; None keeps the module's own.

    Floating-point tensors only. Outside forward and backward, and in ``state_dict``, parameters keep full precision.
    Without ``reduce_dtype`` gradients are reduced in ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Devices:
    type: str
    ids: list[int] | None
    output: int | None


def check_module(module: nn.Module, members: Sequence[NamedParameter], ignored: Collection[str]) -> None:
    """Check that the module has something to train, all of it initialised, of kinds that can be trained."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise RuntimeError(
            "the module has lazy parameters that are not initialised yet; run one forward pass before wrapping it"
        )
    if not members:
        raise RuntimeError(
            "the module has no parameter that requires a gradient, so there is nothing to reduce; use it unwrapped"
        )
    for name, param in module.named_parameters():
        if name not in ignored:
            check_trainable(name, param)


def check_devices(
    params: Sequence[nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> Devices:
    """Return which devices inputs and outputs go to; ``ValueError`` if the arguments do not fit the parameters."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids has {len(device_ids)} entries; expected None or one (one process per device)")
    kinds = {param.device.type for param in params}
    if len(kinds) != 1:
        raise ValueError(f"the parameters are on devices of types {sorted(kinds)}; expected one type")
    kind = kinds.pop()
    if not device_ids or is_host(kind) or len({param.device for param in params}) > 1:
        if device_ids or output_device is not None:
            raise ValueError(
                f"device_ids={device_ids} and output_device={output_device} are for modules on one accelerator; the "
                f"parameters are on {sorted({str(param.device) for param in params})}: pass neither"
            )
        return Devices(kind, None, None)
    first = _index(device_ids[0])
    return Devices(kind, [first], first if output_device is None else _index(output_device))


def _index(device: int | torch.device) -> int:
    if isinstance(device, torch.device):
        return device.index or 0
    return int(device)


def check_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    if is_host(device_type) and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise ValueError("SyncBatchNorm needs the module on an accelerator; on CPU use the plain BatchNorm layers")


def check_reduce(reduce: str) -> None:
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r}; expected one of {', '.join(REDUCTIONS)}")


def buffer_syncs(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """(broadcast before forward, broadcast at construction) from the old flag and its successor."""
    if broadcast_buffers is not None:
        # The caller is two frames up: the constructor called this.
        warnings.warn(
            "broadcast_buffers is the old name of forward_sync_buffers; note that forward_sync_buffers=False still "
            "synchronises buffers once at construction",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    wanted = True if broadcast_buffers is None else broadcast_buffers
    return wanted, wanted


def warn_check_reduction(check_reduction: bool) -> None:
    if check_reduction:
        warnings.warn("check_reduction does nothing; leave it out", FutureWarning, stacklevel=3)


def check_delayed(named: Any, trigger: Any) -> None:
    if (named is None) != (trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce go together: give both or none")


def check_groups(process_group: Any, device_mesh: Any) -> None:
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("give process_group or device_mesh, not both")
    if device_mesh is not None and device_mesh.ndim != 1:
        raise RuntimeError(f"device_mesh has {device_mesh.ndim} axes; expected 1: pass a slice, e.g. mesh['dp']")
