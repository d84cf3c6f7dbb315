"""Between each rank's own tensor and the distributed one: ``DTensor.from_local``, and gradients of ``to_local``.

Owns their checks. Sizes are gathered along the axes that shard (along all of them with ``run_check``), and every rank
that took part decides by the same numbers: shards that do not fit raise on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import DeviceMesh
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.dispatch._distribute import check_plain, mesh_or_current, one_for_each_axis
from phalanx.tensor.dispatch._local_shapes import (
    Coordinate,
    LocalShape,
    coordinates,
    gathered_shapes,
    listing,
)
from phalanx.tensor.layout._placement import Placement, Shard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._execute import GradLayout
from phalanx.tensor.redistribute._log import listening, log_collectives
from phalanx.tensor.redistribute._traced import is_traced


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    """Make a DTensor of each rank's ``local``; see ``DTensor.from_local``."""
    mesh = mesh_or_current(device_mesh)
    if isinstance(local, DTensor):
        raise TypeError("from_local takes this rank's plain tensor, got a DTensor")
    check_plain("from_local", local)
    wanted = one_for_each_axis(placements, mesh, local)
    if is_traced(local):
        return _traced_from_local(local, mesh, wanted, run_check, shape, grad_placements)
    told = [
        axis
        for axis, p in enumerate(wanted)
        if mesh.shape[axis] > 1 and (run_check or (shape is None and isinstance(p, Shard)))
    ]
    with listening() as heard:
        spec = _fitting(local, mesh, wanted, shape, told)
        if run_check:
            local = _first_replica(local, spec)
    log_collectives("from_local to", spec, heard)
    if grad_placements is not None:
        apply: Any = GradLayout.apply
        result = wrap(apply(local, spec.cotangent, spec.of_gradient(grad_placements)), spec)
    else:
        result = wrap(_alias(local), spec)
    if stride is not None:
        _check_stride(result, tuple(stride))
    return result


def _traced_from_local(
    local: Tensor,
    mesh: DeviceMesh,
    wanted: tuple[Placement, ...],
    run_check: bool,
    shape: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    """``from_local`` in a trace of torch.compile, where no rank may ask another: some run a graph that they have."""
    asks = [a for a, p in enumerate(wanted) if mesh.shape[a] > 1 and shape is None and isinstance(p, Shard)]
    if run_check or asks:
        raise NotImplementedError(
            f"rank {mesh.get_rank()}: from_local inside torch.compile would ask the other ranks for their shapes "
            f"(run_check={run_check}, shape={shape}, placements={wanted}); pass shape=, the global one, or call it "
            f"outside of the compiled function"
        )
    sizes = tuple(int(size) for size in (local.shape if shape is None else shape))  # a layout is made of numbers
    spec = _fitting(local, mesh, wanted, sizes, [])
    if grad_placements is not None:
        apply: Any = GradLayout.apply
        return wrap(apply(local, spec.cotangent, spec.of_gradient(grad_placements)), spec)
    return wrap(local.view_as(local), spec)


def _fitting(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    axes: list[int],
) -> Spec:
    """Return the layout of which ``local`` is this rank's shard; shards along ``axes`` are checked."""
    if not axes:
        spec = Spec.of(mesh, placements, local.shape if shape is None else tuple(shape), local.dtype)
        if spec.local_shape != tuple(local.shape):
            raise ValueError(
                f"rank {mesh.get_rank()}: from_local got a local tensor of shape {tuple(local.shape)}, but {spec!r} "
                f"gives this rank {spec.local_shape}; {_CHUNKS}, or pass the right shape="
            )
        return spec
    own = LocalShape.of(local, tuple(shape) if shape is not None else None)
    device = mesh.device_type if local.is_meta else str(local.device)
    shapes = gathered_shapes(mesh, axes, own, device)
    if len({(len(held.shape), held.dtype, held.facts) for held in shapes.values()}) > 1:
        raise ValueError(
            f"rank {mesh.get_rank()}: from_local got {listing(mesh, shapes)}; expected the same number of dims and the "
            f"same dtype (and the same shape=, if one is given) on every rank"
        )
    full = tuple(shape) if shape is not None else global_shape(shapes, placements, axes)
    spec = Spec.of(mesh, placements, full, local.dtype)
    if [held.shape for held in shapes.values()] != _expected(spec, axes):
        fitting = {where: LocalShape(s, local.dtype) for where, s in zip(shapes, _expected(spec, axes), strict=True)}
        raise ValueError(
            f"rank {mesh.get_rank()}: from_local got {listing(mesh, shapes)}, but the parts of {spec!r} are "
            f"{listing(mesh, fitting)}; {_CHUNKS}"
        )
    return spec


_CHUNKS = (
    "shards are cut as torch.chunk cuts, all of the rounded-up size, the last ones smaller, and replicas have one "
    "shape. Move rows between ranks first"
)


def global_shape(
    shapes: dict[Coordinate, LocalShape], placements: Sequence[Placement], axes: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the tensor that ``shapes`` make, if they fit: the rows of each dim, along the axes that shard
    it.
    """
    shape = []
    for dim in range(len(next(iter(shapes.values())).shape)):
        others = [axis for axis in axes if not placements[axis].is_shard(dim)]
        rows = [held.shape[dim] for where, held in shapes.items() if not any(where[a] for a in others)]
        shape.append(sum(rows))
    return tuple(shape)


def _expected(spec: Spec, axes: Sequence[int]) -> list[tuple[int, ...]]:
    key = ("parts", *axes)
    found: list[tuple[int, ...]] | None = spec.variants.get(key)
    if found is None:
        found = [spec.shape_at(where) for where in coordinates(spec.mesh, axes)]
        spec.variants[key] = found
    return found


def _first_replica(local: Tensor, spec: Spec) -> Tensor:
    """Say what the first rank holds, along every axis of replicas."""
    if not any(p.is_replicate() for p in spec.placements) or local.is_meta:
        return local
    copy = local.detach().clone(memory_format=torch.contiguous_format)
    for axis, placement in enumerate(spec.placements):
        if placement.is_replicate():
            spec.mesh.get_group(axis).broadcast(copy, 0)
    if not local.requires_grad:
        return copy
    apply: Any = _Replaced.apply
    replaced: Tensor = apply(local, copy)
    return replaced


def _alias(local: Tensor) -> Tensor:
    """Return ``local`` as a tensor of its own in the same memory, which may be written even if ``local`` is a leaf."""
    if not (local.requires_grad and local.is_leaf and torch.is_grad_enabled()):
        return local.view_as(local)
    apply: Any = _Replaced.apply
    alias: Tensor = apply(local, local.detach())
    return alias


class _Replaced(torch.autograd.Function):
    """``local`` with other values; its gradient is that of what takes its place."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()  # no view to autograd: it may be written in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _check_stride(tensor: DTensor, given: tuple[int, ...]) -> None:
    """``given`` is that of a contiguous global tensor, or of one in the order of the local tensor; dims of one row may
    say anything.
    """
    contiguous = torch.empty(tensor.shape, device="meta").stride()
    counting = [d for d, size in enumerate(tensor.shape) if size > 1]
    for expected in (contiguous, tensor.stride()):
        if len(given) == tensor.ndim and all(given[d] == expected[d] for d in counting):
            return
    raise ValueError(
        f"from_local got stride={given} for shape {tuple(tensor.shape)}, expected {tuple(tensor.stride())}: the memory "
        f"of a DTensor has the order of its local tensor"
    )
