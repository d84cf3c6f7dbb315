"""Tensor parallelism by declaration: styles say how a module's weights and activations are laid out on a mesh axis.

>>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
>>> parallelize_module(mlp, mesh["tp"], plan)   # doctest: +SKIP
"""

from __future__ import annotations

from phalanx.tensor.parallel._boundaries import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from phalanx.tensor.parallel._loss_block import loss_parallel
from phalanx.tensor.parallel._parallelize import parallelize_module
from phalanx.tensor.parallel._style import ParallelStyle
from phalanx.tensor.parallel._weights import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
