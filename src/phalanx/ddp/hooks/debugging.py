"""Does nothing in place of a reduction, to see how much time communication takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.hooks._future import finished


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Leave the local gradients as they are. Replicas drift apart: for measuring only."""
    return finished(bucket.buffer())
