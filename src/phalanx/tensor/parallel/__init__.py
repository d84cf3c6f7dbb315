"""Tensor parallelism: styles that lay out a module's parameters and its inputs and outputs over one mesh axis."""

from __future__ import annotations

from phalanx.tensor.parallel._apply import parallelize_module
from phalanx.tensor.parallel._loss import loss_parallel
from phalanx.tensor.parallel._styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

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
