"""Making DTensors from nothing: zeros, ones, empty, full, rand, randn, arange.

Owns the factories. Each rank makes its own part; nothing is sent. Random values belong to elements (``_noise.py``),
so they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.tensor import _noise
from phalanx.tensor._distribute import mesh_or_current
from phalanx.tensor._dtensor import DTensor, wrap
from phalanx.tensor._placement import REPLICATE, Placement
from phalanx.tensor._random import next_stream
from phalanx.tensor._spec import Spec

Make = Callable[[Spec, torch.device], Tensor]


def _build(
    shape: Sequence[int],
    make: Make,
    dtype: torch.dtype | None,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    layout: torch.layout = torch.strided,
) -> DTensor:
    if layout is not torch.strided:
        raise ValueError(f"DTensors are strided, not {layout}")
    mesh = mesh_or_current(device_mesh)
    spec = Spec.of(mesh, placements or [REPLICATE] * mesh.ndim, shape, dtype or torch.get_default_dtype())
    return wrap(make(spec, torch.device(mesh.device_type)).requires_grad_(requires_grad), spec)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else tuple(size)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """
    >>> zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])   # doctest: +SKIP
    """
    return full(_size(size), 0, dtype=dtype or torch.get_default_dtype(), requires_grad=requires_grad, layout=layout,
                device_mesh=device_mesh, placements=placements)  # fmt: skip


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of ones; see ``zeros``."""
    return full(_size(size), 1, dtype=dtype or torch.get_default_dtype(), requires_grad=requires_grad, layout=layout,
                device_mesh=device_mesh, placements=placements)  # fmt: skip


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor filled with ``fill_value``."""
    chosen = dtype or torch.full((), fill_value).dtype

    def make(spec: Spec, device: torch.device) -> Tensor:
        local = torch.full(spec.local_shape, fill_value, dtype=spec.dtype, device=device)
        return _as_contribution(local, spec)

    return _build(size, make, chosen, requires_grad, device_mesh, placements, layout)


def _as_contribution(local: Tensor, spec: Spec) -> Tensor:
    """Where ``spec`` is partial, the value is whole on the first rank and neutral on the others."""
    from phalanx.tensor._execute import redistribute_local

    return redistribute_local(local, spec.cotangent, spec)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """An uninitialised DTensor."""
    return _build(
        _size(size),
        lambda spec, device: torch.empty(spec.local_shape, dtype=spec.dtype, device=device),
        dtype, requires_grad, device_mesh, placements, layout,
    )  # fmt: skip


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform in [0, 1); the same values under every layout."""

    def make(spec: Spec, device: torch.device) -> Tensor:
        like = torch.empty((), dtype=spec.dtype, device=device)
        return _as_contribution(_noise.uniform_tensor(spec.cotangent, next_stream(spec.mesh), like), spec)

    return _build(_size(size), make, dtype, requires_grad, device_mesh, placements, layout)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Standard normal; the same values under every layout."""

    def make(spec: Spec, device: torch.device) -> Tensor:
        whole = spec.cotangent
        values = _noise.normal(_noise.element_bits(whole, next_stream(spec.mesh)))
        like = torch.empty((), dtype=spec.dtype, device=device)
        return _as_contribution(_noise.to_tensor(values, like, whole.local_shape), spec)

    return _build(_size(size), make, dtype, requires_grad, device_mesh, placements, layout)


def randperm(
    n: int, *, dtype: torch.dtype = torch.int64, device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:  # fmt: skip
    """A permutation of 0 .. n-1; the same on every rank and under every layout."""
    mesh = mesh_or_current(device_mesh)
    order = torch.from_numpy(_noise.words(next_stream(mesh), 0, n).argsort(kind="stable").copy())
    return _cut(order.to(dtype), mesh, placements)


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
    return _cut(values, mesh, placements).requires_grad_(requires_grad)


def _cut(values: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> DTensor:
    from phalanx.tensor._distribute import distribute_tensor

    return distribute_tensor(values, mesh, placements, src_data_rank=None)
