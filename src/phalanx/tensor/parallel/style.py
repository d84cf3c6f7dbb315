"""The styles under the module name that torch's users import them from."""

from __future__ import annotations

from phalanx.tensor.parallel._boundaries import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
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
]
