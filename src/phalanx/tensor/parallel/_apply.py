"""Applying styles to the parts of a model by name.

Owns ``parallelize_module``.
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatch

from torch import nn

from phalanx.comm import DeviceMesh
from phalanx.tensor._distribute import mesh_or_current
from phalanx.tensor.parallel._styles import ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply a style to ``module``, or styles to its parts: names with dots, each part may be a pattern (``layers.*.up``).

    >>> parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel()})   # doctest: +SKIP
    """
    mesh = mesh_or_current(device_mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module takes a mesh of one axis, got {mesh!r}: slice it, as in mesh['tp']"
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a plan leaves the module as it is", stacklevel=2)
        return module
    if isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan.src_data_rank = src_data_rank
        return parallelize_plan.apply(module, mesh)
    if not isinstance(parallelize_plan, dict):
        raise TypeError(
            f"the plan is a ParallelStyle or a dict of them, got {type(parallelize_plan).__name__}"
        )
    for pattern, style in parallelize_plan.items():
        found = _parts(module, pattern)
        if not found:
            warnings.warn(f"no part of the module is called {pattern!r}", stacklevel=2)
        for part in found:
            parallelize_module(part, mesh, style, src_data_rank=src_data_rank)
    return module


def _parts(module: nn.Module, pattern: str) -> list[nn.Module]:
    if not pattern:
        return [module]
    first, _, rest = pattern.partition(".")
    return [
        found
        for name, child in module.named_children()
        if fnmatch(name, first)
        for found in _parts(child, rest)
    ]
