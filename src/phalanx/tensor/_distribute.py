"""From plain tensors to distributed ones, and from one layout to another: the user-facing moves.

Owns ``distribute_tensor``, ``from_local``, ``redistribute`` and ``distribute_module``; the plans are ``_plan.py``'s
and run in ``_execute.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import DeviceMesh, Group
from phalanx.comm._mesh import current_mesh
from phalanx.tensor._dtensor import DTensor, wrap
from phalanx.tensor._execute import GradLayout, move_as, redistribute_local, route_of, run_plan, start_plan
from phalanx.tensor._log import listening, log_collectives
from phalanx.tensor._modes import check_explicit_move
from phalanx.tensor._order import kept_order
from phalanx.tensor._pending import pending
from phalanx.tensor._placement import REPLICATE, Partial, Placement, Shard, chunk_sizes, normalize
from phalanx.tensor._plan import plan_redistribute
from phalanx.tensor._spec import Spec
from phalanx.tensor._ties import keeping_ties


def mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    found = mesh if mesh is not None else current_mesh()
    if found is None:
        raise ValueError("no device mesh: pass one, or enter one with `with mesh:`")
    if not isinstance(found, DeviceMesh):
        raise TypeError(
            f"expected a phalanx.comm.DeviceMesh (see init_device_mesh), got {found!r}, "
            f"a {type(found).__module__}.{type(found).__qualname__}"
        )
    return found


def _check_plain(call: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{call} takes a torch.Tensor, got a {type(tensor).__name__}: make it one with torch.as_tensor()"
        )


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A leaf DTensor of ``tensor``, laid out by ``placements`` (default: replicated).

    The data of the rank at coordinate ``src_data_rank`` of each axis is what counts; with None each rank cuts its own
    copy and nothing is sent.

    >>> distribute_tensor(torch.arange(8), mesh, [Shard(0)])   # doctest: +SKIP
    """
    mesh = mesh_or_current(device_mesh)
    _check_plain("distribute_tensor", tensor)
    wanted = _one_for_each_axis(placements, mesh, tensor)
    if isinstance(tensor, DTensor):
        if tensor._spec.mesh != mesh or tensor.placements != wanted:
            raise ValueError(f"the tensor is distributed already, as {tensor._spec!r}: use redistribute()")
        return tensor
    if any(isinstance(p, Partial) for p in wanted):
        raise ValueError(
            f"distribute_tensor makes shards and replicas, not {list(wanted)}; see DTensor.from_local"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"distribute_tensor makes leaves, but got the result of {tensor.grad_fn!r}, which would get no gradient: "
            f"use DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim).redistribute(placements=...), or t.detach()"
        )
    spec = Spec.of(mesh, wanted, tensor.shape, tensor.dtype)
    if mesh.get_coordinate() is None:
        return wrap(tensor.detach().new_empty((0,)), spec)
    local = tensor.detach().to(mesh.device_type)
    if src_data_rank is None:
        local = redistribute_local(local, spec.replicated, spec)
        shared = local.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        local = local.clone(memory_format=torch.contiguous_format) if shared else local
    else:
        with listening() as heard:
            local = _spread(local, spec, src_data_rank)
        log_collectives("distribute_tensor to", spec, heard)
    return wrap(local.requires_grad_(tensor.requires_grad), spec)


def _spread(local: Tensor, spec: Spec, src: int) -> Tensor:
    """Axis by axis: scatter chunks or broadcast copies from the rank at coordinate ``src``."""
    mesh = spec.mesh
    for axis, placement in enumerate(spec.placements):
        group = mesh.get_group(axis)
        seen = _gathered(group, [_checksum(tuple(spec.shape), spec.dtype)], local.device)
        if len(set(seen)) > 1:
            given = group.all_gather_values(f"{spec.dtype}{list(spec.shape)}")
            raise ValueError(
                f"rank {mesh.get_rank()}: distribute_tensor got {given} along axis {axis} of the mesh; expected the "
                f"same shape and dtype on every rank (only the data may differ: that of rank {src} counts)"
            )
        if type(placement) is Shard:
            sizes = chunk_sizes(local.shape[placement.dim], group.size)
            parts = [part.contiguous() for part in torch.split(local, list(sizes), placement.dim)]
            mine = torch.empty_like(parts[group.rank])
            group.scatter(mine, parts if group.rank == src else None, src)
            local = mine
        else:
            local = local.clone(memory_format=torch.contiguous_format)
            group.broadcast(local, src)
            if isinstance(placement, Shard):
                before = [*spec.placements[:axis], *[REPLICATE] * (mesh.ndim - axis)]
                after = [*before[:axis], placement, *before[axis + 1 :]]
                whole = Spec.of(mesh, before, spec.shape, spec.dtype)
                local = redistribute_local(local, whole, whole.with_placements(after))
    return local


def _one_for_each_axis(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, tensor: Tensor
) -> tuple[Placement, ...]:
    return normalize([REPLICATE] * mesh.ndim if placements is None else placements, mesh.ndim, tensor.dim())


def _checksum(*facts: object) -> int:
    return zlib.crc32(repr(facts).encode())


def _gathered(group: Group, own: list[int], device: torch.device) -> list[tuple[int, ...]]:
    """Every rank's ``own``."""
    if group.size == 1:
        return [tuple(own)]
    numbers = torch.empty(group.size * len(own), dtype=torch.int64, device=device)
    group.all_gather_into_tensor(numbers, torch.tensor(own, device=device))
    return [tuple(row) for row in numbers.view(group.size, len(own)).tolist()]


def from_local(
    local: Tensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    """See ``DTensor.from_local``."""
    mesh = mesh_or_current(device_mesh)
    if isinstance(local, DTensor):
        raise TypeError("from_local takes this rank's plain tensor, got a DTensor")
    _check_plain("from_local", local)
    wanted = _one_for_each_axis(placements, mesh, local)
    if mesh.get_coordinate() is None:
        return wrap(local.new_empty((0,)), Spec.of(mesh, wanted, shape or local.shape, local.dtype))
    with listening() as heard:
        if run_check:
            local = _same_replicas(local, mesh, wanted)
        full = tuple(shape) if shape is not None else _gathered_shape(local, mesh, wanted)
    spec = Spec.of(mesh, wanted, full, local.dtype)
    log_collectives("from_local to", spec, heard)
    if spec.local_shape != tuple(local.shape):
        raise ValueError(
            f"rank {mesh.get_rank()}: from_local got a local tensor of shape {tuple(local.shape)}, but {spec!r} gives "
            f"this rank {spec.local_shape}; {_CHUNKS.format(spec.local_shape)}, or pass the right shape="
        )
    if grad_placements is not None:
        apply: Any = GradLayout.apply
        return wrap(apply(local, spec.cotangent, spec.of_gradient(grad_placements)), spec)
    return wrap(local.view_as(local), spec)


def check_stride(tensor: DTensor, given: tuple[int, ...]) -> None:
    """``given`` is that of a contiguous whole, or of one in the order of the local tensor; dims of one row may say
    anything.
    """
    if tensor.device_mesh.get_coordinate() is None:
        return
    contiguous = torch.empty(tensor.shape, device="meta").stride()
    counting = [d for d, size in enumerate(tensor.shape) if size > 1]
    for expected in (contiguous, tensor.stride()):
        if len(given) == tensor.ndim and all(given[d] == expected[d] for d in counting):
            return
    raise ValueError(
        f"from_local got stride={given} for shape {tuple(tensor.shape)}, expected {tuple(tensor.stride())}: the memory "
        f"of a DTensor has the order of its local tensor"
    )


def _same_replicas(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    for axis, placement in enumerate(placements):
        group = mesh.get_group(axis)
        shapes = group.all_gather_values(list(local.shape))
        dim = placement.dim if isinstance(placement, Shard) else None
        if any(
            [n for d, n in enumerate(s) if d != dim] != [n for d, n in enumerate(shapes[0]) if d != dim]
            for s in shapes
        ):
            raise ValueError(
                f"rank {mesh.get_rank()}: local shapes differ along axis {axis} of the mesh: {shapes}"
            )
        if placement.is_replicate():
            copy = local.detach().clone(memory_format=torch.contiguous_format)
            group.broadcast(copy, 0)
            local = local + (copy - local.detach()) if local.requires_grad else copy
    return local


def _gathered_shape(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The global shape: sizes of sharded dims summed over their axes, innermost axis first."""
    shape = list(local.shape)
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, Shard) or mesh.shape[axis] == 1:
            continue
        group, dim = mesh.get_group(axis), placement.dim
        others = _checksum(shape[:dim], shape[dim + 1 :], local.dtype)
        seen = _gathered(group, [shape[dim], others], local.device)
        if len({rest for _, rest in seen}) > 1:
            given = group.all_gather_values(f"{local.dtype}{list(local.shape)}")
            raise ValueError(
                f"rank {mesh.get_rank()}: from_local got {given} along axis {axis} of the mesh; expected the same "
                f"dtype, and shapes that differ at most in dim {dim}, which {placement!r} cuts"
            )
        sizes = tuple(size for size, _ in seen)
        shape[dim] = sum(sizes)
        if type(placement) is Shard and sizes != chunk_sizes(shape[dim], mesh.shape[axis]):
            raise ValueError(
                f"rank {mesh.get_rank()}: from_local got parts of {list(sizes)} along dim {dim}; "
                f"{_CHUNKS.format(chunk_sizes(shape[dim], mesh.shape[axis]))}"
            )
    return tuple(shape)


_CHUNKS = (
    "shards are cut as torch.chunk cuts, all of the rounded-up size, the last ones smaller: expected {}. "
    "Move rows between ranks first"
)


def redistribute(
    tensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> DTensor:
    """See ``DTensor.redistribute``."""
    spec = tensor._spec
    if device_mesh is not None and device_mesh != spec.mesh:
        raise ValueError(
            f"redistribute keeps the mesh: the tensor is on {spec.mesh!r}, not on {device_mesh!r}"
        )
    if placements is None:
        raise ValueError("redistribute needs placements")
    local = tensor._local
    if forward_dtype is not None:
        spec = spec.with_dtype(forward_dtype)
        if not (forward_dtype.is_floating_point or forward_dtype.is_complex):
            local = local.detach()  # whole numbers have no gradient
    target = spec.variants.get(tuple(placements))
    if target is None:
        target = spec.with_placements(normalize(placements, spec.mesh.ndim, len(spec.shape)))
    if target is spec and backward_dtype is None:
        return tensor if spec is tensor._spec else wrap(local.to(spec.dtype), spec)
    plan = plan_redistribute(spec, target)
    route = route_of(plan)
    if not route.is_relabel:
        spec.routes[tuple(placements)] = route
    elif target is not spec:  # on axes of one rank: a copy, as on longer ones
        local = local.clone()
    if async_op and plan.communicates:
        return pending(target, start_plan(local, plan, backward_dtype))
    if local.dtype == spec.dtype and backward_dtype is None:
        return wrap(redistribute_local(local, spec, target), target)
    if local.requires_grad and torch.is_grad_enabled():
        return wrap(move_as(local, plan, backward_dtype), target)
    return wrap(run_plan(local.to(spec.dtype), plan), target)


def redistribute_input(tensor: DTensor, target: Spec, op: str) -> Tensor:
    """The local of ``tensor`` laid out as ``target``, because an operation needs it so."""
    if target is tensor._spec:
        return tensor._local
    check_explicit_move(op, tensor._spec, target)
    return kept_order(redistribute_local(tensor._local, tensor._spec, target), target, tensor)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors: by ``partition_fn``, the rest replicated.

    Parameters that submodules share stay shared.

    ``input_fn(module, inputs, mesh)`` and ``output_fn(module, outputs, mesh)`` run around its forward.
    """
    mesh = mesh_or_current(device_mesh)
    with keeping_ties(module):
        for name, part in module.named_modules():
            if partition_fn is not None:
                partition_fn(name, part, mesh)
            replicate_rest(part, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    return module


def replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the parameters and buffers of ``module`` itself that are plain tensors still."""
    for key, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, DTensor):
            distributed = distribute_tensor(parameter.detach(), mesh)
            module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))
    for key, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[key] = distribute_tensor(buffer, mesh)
