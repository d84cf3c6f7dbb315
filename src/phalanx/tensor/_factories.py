"""Making DTensors from nothing: zeros, ones, empty, full, rand, randn, arange, randperm.

Owns the factories. Each rank makes its own shard; nothing is sent. Random values belong to elements (``_philox.py``),
so they do not depend on the layout. Where a layout is partial, the value is complete on the first rank and neutral on
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.dispatch._distribute import distribute_tensor, mesh_or_current
from phalanx.tensor.layout._placement import REPLICATE, Placement
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.random import _philox
from phalanx.tensor.random._distributions import NORMAL, UNIFORM, Distribution
from phalanx.tensor.random._drawing import FLOATS, INTEGERS, require, require_dtype
from phalanx.tensor.random._state import next_stream
from phalanx.tensor.redistribute._execute import redistribute_local

Make = Callable[[Spec, torch.device], Tensor]  # this rank's shard of a tensor that is nowhere partial


def _build(
    shape: Sequence[int],
    make: Make,
    dtype: torch.dtype | None,
    requires_grad: bool,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    if layout is not torch.strided:
        raise ValueError(f"DTensors are strided, not {layout}")
    mesh = mesh_or_current(device_mesh)
    wanted = [REPLICATE] * mesh.ndim if placements is None else placements
    spec = Spec.of(mesh, wanted, shape, dtype or torch.get_default_dtype())
    local = redistribute_local(make(spec.cotangent, torch.device(mesh.device_type)), spec.cotangent, spec)
    return wrap(local.requires_grad_(requires_grad), spec)


def _factory(name: str, doc: str, make: Make) -> Callable[..., DTensor]:
    """Return a factory that takes sizes one by one or as a sequence, as torch's do."""

    def factory(
        *size: Any,
        requires_grad: bool = False,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
        return _build(shape, make, dtype, requires_grad, layout, device_mesh, placements)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = doc
    return factory


def _filled(value: complex) -> Make:
    return lambda spec, device: torch.full(spec.local_shape, value, dtype=spec.dtype, device=device)


def _random(distribution: Distribution, name: str) -> Make:
    def make(spec: Spec, device: torch.device) -> Tensor:
        return _philox.filled(spec, next_stream(spec.mesh), distribution.standard(spec.dtype, name), device)

    return make


zeros = _factory(
    "zeros",
    """A DTensor of zeros.

    >>> zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])   # doctest: +SKIP
    """,
    _filled(0),
)
ones = _factory("ones", "A DTensor of ones; see ``zeros``.", _filled(1))
empty = _factory(
    "empty",
    "An uninitialised DTensor; see ``zeros``.",
    lambda spec, device: torch.empty(spec.local_shape, dtype=spec.dtype, device=device),
)
rand = _factory(
    "rand", "Uniform in [0, 1); the same values under every layout. See ``zeros``.", _random(UNIFORM, "rand")
)
randn = _factory(
    "randn", "Standard normal; the same values under every layout. See ``zeros``.", _random(NORMAL, "randn")
)


def full(
    size: Sequence[int],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor filled with ``fill_value``, of its dtype unless told otherwise."""
    chosen = dtype or torch.full((), fill_value).dtype
    return _build(size, _filled(fill_value), chosen, requires_grad, layout, device_mesh, placements)


def randperm(
    n: int, *, dtype: torch.dtype = torch.int64, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """Return a permutation of 0 .. n-1; the same on every rank and under every layout."""
    require(n >= 0, f"randperm needs n >= 0, got {n}")
    require_dtype("randperm", dtype, FLOATS | INTEGERS)
    most = 2 ** _philox.DIGITS[dtype] if dtype in FLOATS else torch.iinfo(dtype).max
    require(n - 1 <= most, f"randperm({n}) holds numbers up to {n - 1}; {dtype} counts to {most}")
    mesh = mesh_or_current(device_mesh)
    order = torch.from_numpy(_philox.words(next_stream(mesh), 0, n).argsort(kind="stable").copy())
    return distribute_tensor(order.to(dtype), mesh, placements, src_data_rank=None)


def arange(
    *bounds: float,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """``torch.arange`` laid out by ``placements``."""
    mesh = mesh_or_current(device_mesh)
    values = torch.arange(*bounds, dtype=dtype, device=mesh.device_type)
    return distribute_tensor(values, mesh, placements, src_data_rank=None).requires_grad_(requires_grad)
