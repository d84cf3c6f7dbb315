"""Reduces plainly or in half precision, and wraps any hook with such compression.

The state of these hooks is the group to reduce over; None is the wrapper's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.hooks._future import future_of
from phalanx.ddp.hooks._hook_group import resolve

Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]


def mean_over(process_group: Any, tensor: Tensor) -> torch.futures.Future[Tensor]:
    """``tensor`` becomes its mean over the group; divided first, so that small floats do not overflow."""
    group = resolve(process_group)
    return future_of(group.all_reduce(tensor.div_(group.size), async_op=True), tensor)


def allreduce_hook(process_group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean over all ranks: the same as no hook.

    >>> ddp.register_comm_hook(None, allreduce_hook)      # doctest: +SKIP
    """
    return mean_over(process_group, bucket.buffer())


def _compressed(dtype: torch.dtype, process_group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    half = mean_over(process_group, bucket.as_dtype(dtype))
    return half.then(lambda future: buffer.copy_(future.value()))


def fp16_compress_hook(process_group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce in float16: half the bytes."""
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce in bfloat16: half the bytes, the range of float32."""
    return _compressed(torch.bfloat16, process_group, bucket)


SENT_AS: dict[Hook, torch.dtype] = {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}
"""Hooks that look at a bucket in one dtype only: gradients may be written in it from the beginning."""


def _around(dtype: torch.dtype, hook: Hook, name: str) -> Hook:
    def wrapper(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        full = bucket.buffer()
        bucket.set_buffer(full.to(dtype))

        def back(future: torch.futures.Future[Tensor]) -> Tensor:
            bucket.set_buffer(full.copy_(future.value()))
            return full

        return hook(state, bucket).then(back)

    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """``hook`` on a float16 copy of the bucket; its result is cast back.

    >>> ddp.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))      # doctest: +SKIP
    """
    return _around(torch.float16, hook, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """``hook`` on a bfloat16 copy of the bucket; its result is cast back."""
    return _around(torch.bfloat16, hook, "bf16_compress_wrapper_hook")
