"""Sends gradients as 8-bit integers: gathered from all ranks, expanded and averaged locally.

Each rank sends, per tensor or per channel (a run of ``bucket_size`` elements), a scale and a zero point, then the
integers. State of the hooks: the group; None is the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.hooks._future import LazyFuture, future_of
from phalanx.ddp.hooks._hook_group import resolve

LEVELS = 255


def choose_scale(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point that map [lowest, highest], widened to hold 0, onto the integers 0..255."""
    lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)
    scale = ((highest - lowest) / LEVELS).clamp(min=torch.finfo(torch.float32).eps)
    return scale, (-torch.round(lowest / scale)).clamp(0, LEVELS)


def quantize(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (torch.round(values / scale) + zero).clamp(0, LEVELS).to(torch.uint8)


def dequantize(integers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return scale * (integers.to(torch.float32) - zero)


def quantization_pertensor_hook(process_group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return one scale for the whole bucket.

    >>> ddp.register_comm_hook(None, quantization_pertensor_hook)      # doctest: +SKIP
    """
    tensor = bucket.buffer()
    return _exchange(process_group, tensor.reshape(1, -1), lambda mean: mean.reshape(-1).to(tensor.dtype))


def quantization_perchannel_hook(
    process_group: Any, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[Tensor]:
    """Return one scale for every ``bucket_size`` elements: closer to the true values, slightly more to send."""
    tensor = bucket.buffer()
    padding = bucket_size - tensor.numel() % bucket_size
    channels = torch.nn.functional.pad(tensor, (0, padding)).view(-1, bucket_size)
    return _exchange(process_group, channels, lambda mean: mean.reshape(-1)[: tensor.numel()].to(tensor.dtype))


def _exchange(
    process_group: Any, channels: Tensor, shape_back: Callable[[Tensor], Tensor]
) -> torch.futures.Future[Tensor]:
    """Mean over the ranks of ``channels`` (one scale per row), each rank's share quantized."""
    group = resolve(process_group)
    scale, zero = choose_scale(channels.amin(1, keepdim=True).float(), channels.amax(1, keepdim=True).float())
    own_levels = torch.stack((scale, zero))
    levels = [torch.empty_like(own_levels) for _ in range(group.size)]
    first = future_of(group.all_gather(levels, own_levels, async_op=True), levels)

    def send_integers(future: LazyFuture) -> list[Tensor]:
        future.value()
        own = quantize(channels, scale, zero)
        everyone = [torch.empty_like(own) for _ in range(group.size)]
        group.all_gather(everyone, own)
        return everyone

    def average(future: LazyFuture) -> Tensor:
        total = torch.zeros_like(channels, dtype=torch.float32)
        for integers, (its_scale, its_zero) in zip(future.value(), levels, strict=True):
            total += dequantize(integers, its_scale, its_zero)
        return shape_back(total / group.size)

    return first.then(send_integers).then(average)
