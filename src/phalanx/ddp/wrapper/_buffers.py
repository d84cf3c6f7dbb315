"""Buffers (and initial parameters): broadcast from one rank in few collectives, or left to a user's hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

if TYPE_CHECKING:
    from phalanx.comm import Group

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
def broadcast_coalesced(
    group: Group, tensors: Sequence[Tensor], src: int, limit: int = BROADCAST_BYTES
) -> None:
    """Make ``tensors`` equal to those of rank ``src``, in one collective per dtype and ``limit`` bytes.

    In place, without autograd noticing: version counters stay, since a forward may still hold these tensors.
    """
    if group.size == 1:
        return
    for chunk in _chunks(tensors, limit):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        group.broadcast(flat, src)
        if group.rank == src:
            continue
        with _unsafe_preserve_version_counter(tuple(chunk)):
            for tensor, part in zip(
                chunk, torch.split(flat, [tensor.numel() for tensor in chunk]), strict=True
            ):
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
    states = [
        param.detach()
        for name, param in module.named_parameters()
        if name not in ignored and f".{name}" not in ignored
    ]
    if buffers:
        states.extend(buffer.detach() for buffer in named_buffers(module, ignored).values())
    broadcast_coalesced(group, states, src)
