"""Reduces in another precision than that of the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.hooks._future import future_of
from phalanx.ddp.hooks._hook_group import resolve
from phalanx.ddp.hooks.default import Hook


def allreduce_in(dtype: torch.dtype) -> Hook:
    """Return a hook that sums in ``dtype``, divides there, and casts back to the bucket's own dtype."""

    def reduce_and_upcast(process_group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group, full = resolve(process_group), bucket.buffer()
        low = bucket.as_dtype(dtype)
        summed = future_of(group.all_reduce(low, async_op=True), low)
        return summed.then(lambda future: full.copy_(future.value().div_(group.size)))

    return reduce_and_upcast
