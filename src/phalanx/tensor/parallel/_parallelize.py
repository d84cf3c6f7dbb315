"""Applying a plan of styles to the modules of a model.

Owns ``parallelize_module`` and how a plan's keys name modules: dotted paths, each part a shell-style pattern.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatch

from torch import nn

from phalanx.comm import DeviceMesh
from phalanx.tensor.dispatch._distribute import mesh_or_current
from phalanx.tensor.dispatch._shared_parameters import keeping_shared_parameters
from phalanx.tensor.parallel._style import ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply a style to ``module``, or to those of its submodules that a plan's keys name; returns ``module``.

    >>> parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel()})   # doctest: +SKIP

    ``device_mesh`` has one axis: take it out of a larger mesh by its name. A key that names no module is warned about.
    """
    mesh = mesh_or_current(device_mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module works on one mesh axis, got {mesh!r}: pass the one to use, as in mesh['tp']"
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module got no plan and does nothing", stacklevel=2)
        return module
    if isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan.src_data_rank = src_data_rank
        with keeping_shared_parameters(module):
            return parallelize_plan._apply(module, mesh)
    if not isinstance(parallelize_plan, dict):
        raise TypeError(f"a plan is a ParallelStyle or a dict of them, got {type(parallelize_plan).__name__}")
    with keeping_shared_parameters(module):
        for path, style in parallelize_plan.items():
            found = list(modules_at(module, path))
            if not found:
                warnings.warn(f"the plan's key {path!r} names no module of {type(module).__name__}", stacklevel=2)
            for part in found:
                parallelize_module(part, mesh, style, src_data_rank=src_data_rank)
    return module


def modules_at(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Return the submodules that ``path`` names; the empty path names ``module`` itself.

    >>> model = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    >>> [type(part).__name__ for part in modules_at(model, "*")]
    ['Linear', 'ReLU']
    """
    if not path:
        yield module
        return
    first, _, rest = path.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, first):
            yield from modules_at(child, rest)
