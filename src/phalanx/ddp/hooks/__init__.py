"""Communication hooks: other ways to reduce a bucket than the plain mean. Register with ``register_comm_hook``."""

from __future__ import annotations

from phalanx.ddp.hooks import debugging, default, mixed_precision, optimizer_overlap

__all__ = ["debugging", "default", "mixed_precision", "optimizer_overlap"]
