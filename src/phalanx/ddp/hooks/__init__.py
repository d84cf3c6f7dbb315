"""Offers communication hooks: other ways to reduce a bucket than the plain mean.

>>> ddp.register_comm_hook(None, hooks.default.fp16_compress_hook)                  # doctest: +SKIP
>>> hooks.register_ddp_comm_hook(hooks.DDPCommHookType.POWER_SGD, ddp)              # doctest: +SKIP
"""

from __future__ import annotations

from phalanx.ddp.hooks import (
    debugging,
    default,
    mixed_precision,
    optimizer_overlap,
    post_local_sgd,
    powersgd,
    quantization,
)
from phalanx.ddp.hooks._types import DDPCommHookType, register_ddp_comm_hook

__all__ = [
    "DDPCommHookType",
    "debugging",
    "default",
    "mixed_precision",
    "optimizer_overlap",
    "post_local_sgd",
    "powersgd",
    "quantization",
    "register_ddp_comm_hook",
]
