"""Synchronises buffers (and initial parameters): broadcasts from one rank in few collectives, or leaves it to a hook.

The functions that take a wrapper are its methods under the names that PyTorch's class has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx._torch_private import preserve_version_counter
from phalanx.ddp.buckets._local_tensors import local_part

if TYPE_CHECKING:
    from phalanx.comm import Group
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel

BROADCAST_BYTES = 250 * 1024 * 1024


class BufferCommHookLocation(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True)
class BufferHook:
    """A user's way of synchronising buffers: ``hook(state, {name: buffer})``, may return futures to await."""

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    location: BufferCommHookLocation


def named_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """Buffers by name, looked up anew each time: modules may have reassigned them."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


@torch.no_grad()
def broadcast_coalesced(group: Group, tensors: Sequence[Tensor], src: int, limit: int = BROADCAST_BYTES) -> None:
    """Make ``tensors`` equal to those of rank ``src``, in one collective per dtype and ``limit`` bytes.

    Of distributed ones, this rank's parts. In place, without autograd noticing: version counters stay, since a forward
    may still hold these tensors.
    """
    if group.size == 1:
        return
    for chunk in _chunks([local_part(tensor) for tensor in tensors], limit):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        group.broadcast(flat, src)
        if group.rank == src:
            continue
        with preserve_version_counter(tuple(chunk)):
            for tensor, part in zip(chunk, torch.split(flat, [tensor.numel() for tensor in chunk]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _chunks(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        kind = (tensor.dtype, tensor.device)
        chunks = by_kind.setdefault(kind, [])
        if not chunks or sizes[kind] + tensor.nbytes > limit:
            chunks.append([])
            sizes[kind] = 0
        chunks[-1].append(tensor)
        sizes[kind] += tensor.nbytes
    return [chunk for chunks in by_kind.values() for chunk in chunks]


def sync_module_states(
    group: Group, module: nn.Module, ignored: Collection[str], *, src: int = 0, buffers: bool = True
) -> None:
    """Give every rank the parameters, and buffers if asked, of rank ``src``."""
    states: list[Tensor] = [
        param for name, param in module.named_parameters() if name not in ignored and f".{name}" not in ignored
    ]
    if buffers:
        states.extend(named_buffers(module, ignored).values())
    broadcast_coalesced(group, states, src)


# ---- the wrapper's methods


def named_module_buffers(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return named_buffers(ddp.module, ddp.parameters_to_ignore)


def modules_buffers(ddp: DistributedDataParallel) -> list[Tensor]:
    return list(named_module_buffers(ddp).values())


def will_sync_module_buffers(ddp: DistributedDataParallel) -> bool:
    if not (ddp.require_forward_param_sync and ddp.forward_sync_buffers):
        return False
    return next(iter(ddp.module.buffers()), None) is not None and bool(ddp.modules_buffers)


def check_sync_bufs_pre_fwd(ddp: DistributedDataParallel) -> bool:
    hook = ddp.buffer_hook
    before = hook is None or hook.location is BufferCommHookLocation.PRE_FORWARD
    return before and ddp.will_sync_module_buffers()


def check_sync_bufs_post_fwd(ddp: DistributedDataParallel) -> bool:
    hook = ddp.buffer_hook
    after = hook is not None and hook.location is BufferCommHookLocation.POST_FORWARD
    return after and ddp.will_sync_module_buffers()


def sync_module_buffers(ddp: DistributedDataParallel, authoritative_rank: int) -> None:
    """Broadcast the buffers of one rank, or run the buffer hook."""
    if ddp.buffer_hook is None:
        ddp._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
        return
    futures = ddp.buffer_hook.hook(ddp.buffer_hook.state, ddp.named_module_buffers)
    if futures is not None:
        waiting = list(futures) if isinstance(futures, list | tuple) else [futures]
        ddp._reducers[0].exchange.await_after_backward(waiting)


def register_buffer_comm_hook(
    ddp: DistributedDataParallel,
    state: Any,
    hook: Callable[[Any, dict[str, Tensor]], Any],
    comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
) -> None:
    """Let ``hook(state, {name: buffer})`` synchronise buffers instead of the broadcast from rank 0.

    Futures that it returns (one or a list) are awaited at the end of backward.
    """
    if not callable(hook):
        raise AssertionError(f"a buffer hook must be callable, got {type(hook).__name__}")
    location = BufferCommHookLocation[comm_hook_location.name]  # torch's enum has the same names
    ddp.buffer_hook = BufferHook(hook, state, location)


def default_broadcast_coalesced(
    ddp: DistributedDataParallel,
    bufs: Sequence[Tensor] | None = None,
    bucket_size: int | None = None,
    authoritative_rank: int = 0,
) -> None:
    tensors = ddp.modules_buffers if bufs is None else bufs
    ddp._distributed_broadcast_coalesced(tensors, bucket_size or ddp.broadcast_bucket_size, authoritative_rank)


def distributed_broadcast_coalesced(
    ddp: DistributedDataParallel, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
) -> None:
    broadcast_coalesced(ddp.group, tensors, authoritative_rank, buffer_size)
