"""``loss_parallel`` under the module name that torch's users import it from."""

from __future__ import annotations

from phalanx.tensor.parallel._loss_block import loss_parallel

__all__ = [
    "loss_parallel",
]
