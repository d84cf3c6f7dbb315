"""From plain tensors to distributed ones, and from one layout to another: the user-facing moves.

Owns ``distribute_tensor``, ``redistribute`` and ``distribute_module`` (``from_local`` is in ``_from_local.py``); the
plans are ``_plan.py``'s and run in ``_execute.py``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._torch_private import make_subclass, module_buffers, module_parameters
from phalanx.comm import DeviceMesh
from phalanx.comm.mesh._mesh import as_mesh, current_mesh
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._implicit_communication import moved_for
from phalanx.tensor.core._memory_order import (
    copied_in_order,
    kept_order,
    memory_order,
    order_number,
    order_of_number,
    packed_in,
    say_order,
    shard_strides,
)
from phalanx.tensor.dispatch._arguments import walk_tensors
from phalanx.tensor.dispatch._local_shapes import LocalShape, gathered_shapes, listing
from phalanx.tensor.dispatch._shared_parameters import keeping_shared_parameters
from phalanx.tensor.layout._placement import REPLICATE, Placement, Shard, chunk_sizes, normalize
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._execute import move_as, redistribute_local, route_of, run_plan, start_plan
from phalanx.tensor.redistribute._log import listening, log_collectives
from phalanx.tensor.redistribute._plan import plan_redistribute


def mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    found = as_mesh(mesh) if mesh is not None else current_mesh()
    if found is None:
        raise ValueError("no device mesh: pass one, or enter one with `with mesh:`")
    if not isinstance(found, DeviceMesh):
        raise TypeError(
            f"expected a phalanx.comm.DeviceMesh (see init_device_mesh), got {found!r}, "
            f"a {type(found).__module__}.{type(found).__qualname__}"
        )
    if found.get_coordinate() is None:
        raise ValueError(
            f"rank {found.get_rank()} is not part of {found!r} and holds nothing of a DTensor there: make DTensors on "
            f"the ranks of the mesh only (mesh.get_coordinate() is None on the others)"
        )
    return found


def check_plain(call: str, tensor: Any) -> None:
    """Check that a tensor can be a local tensor, or be sharded."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{call} takes a torch.Tensor, got a {type(tensor).__name__}: make it one with torch.as_tensor()"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{call} takes a dense tensor, got one of shape {tuple(tensor.shape)} with layout {tensor.layout}: "
            f"make it dense with to_dense()"
        )


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return a leaf DTensor of ``tensor``, laid out by ``placements`` (default: replicated).

    The data of the rank at coordinate ``src_data_rank`` of each axis is what counts, and the order of its dims in
    memory (such as ``channels_last``) is kept; with None each rank shards its own copy and nothing is sent. On an axis
    that is ``Partial``, contributions are made of which the tensor is the sum (or the average, and so on).

    >>> distribute_tensor(torch.arange(8), mesh, [Shard(0)])   # doctest: +SKIP
    """
    mesh = mesh_or_current(device_mesh)
    check_plain("distribute_tensor", tensor)
    wanted = one_for_each_axis(placements, mesh, tensor)
    if isinstance(tensor, DTensor):
        if tensor._spec.mesh != mesh or tensor.placements != wanted:
            raise ValueError(f"the tensor is distributed already, as {tensor._spec!r}: use redistribute()")
        return tensor
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"distribute_tensor makes leaves, but got the result of {tensor.grad_fn!r}, which would get no gradient: "
            f"use DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim).redistribute(placements=...), or t.detach()"
        )
    spec = Spec.of(mesh, wanted, tensor.shape, tensor.dtype)
    whole = tensor.detach()
    with listening() as heard:
        order = memory_order(whole) if src_data_rank is None else _agreed_order(whole, mesh, src_data_rank)
        strides = shard_strides(spec, packed_in(order, spec.shape))
        if whole.is_meta:
            local = torch.empty_strided(spec.local_shape, strides, dtype=spec.dtype, device="meta")
        elif src_data_rank is None:
            local = redistribute_local(whole.to(mesh.device_type), spec.replicated, spec)
        else:
            local = _spread(whole.to(mesh.device_type), spec, src_data_rank)
    log_collectives("distribute_tensor to", spec, heard)
    shared = not local.is_meta and local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if shared or not (local.stride() == strides or say_order(local, strides)):
        local = copied_in_order(local, strides)
    return wrap(local.requires_grad_(tensor.requires_grad), spec)


def _agreed_order(tensor: Tensor, mesh: DeviceMesh, src: int) -> tuple[int, ...]:
    """Check that all ranks mean one tensor; return the order of its dims in the memory of the rank at ``src``."""
    own = LocalShape(tuple(tensor.shape), tensor.dtype, 2 * order_number(memory_order(tensor)) + tensor.is_meta)
    parts = gathered_shapes(mesh, range(mesh.ndim), own, mesh.device_type)
    if len({(part.shape, part.dtype, part.facts % 2) for part in parts.values()}) > 1:
        raise ValueError(
            f"rank {mesh.get_rank()}: distribute_tensor got {listing(mesh, parts)}; expected the same shape and dtype "
            f"on every rank, and tensors on the meta device on all or none (only the data may differ: that of rank "
            f"{src} counts)"
        )
    source = parts.get((src,) * mesh.ndim, own)  # none there: the first collective says so
    return order_of_number(source.facts // 2, tensor.dim())


def _spread(local: Tensor, spec: Spec, src: int) -> Tensor:
    """Axis by axis: scatter chunks or broadcast copies from the rank at coordinate ``src``; contributions at last."""
    mesh = spec.mesh
    for axis, placement in enumerate(spec.cotangent.placements):
        group = mesh.get_group(axis)
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
                before = [*spec.cotangent.placements[:axis], *[REPLICATE] * (mesh.ndim - axis)]
                after = [*before[:axis], placement, *before[axis + 1 :]]
                replicated = Spec.of(mesh, before, spec.shape, spec.dtype)
                local = redistribute_local(local, replicated, replicated.with_placements(after))
    return redistribute_local(local, spec.cotangent, spec)


def one_for_each_axis(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, tensor: Tensor
) -> tuple[Placement, ...]:
    return normalize([REPLICATE] * mesh.ndim if placements is None else placements, mesh.ndim, tensor.dim())


def redistribute(
    tensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> DTensor:
    """Lay ``tensor`` out anew; see ``DTensor.redistribute``."""
    spec = tensor._spec
    if device_mesh is not None and device_mesh != spec.mesh:
        raise ValueError(f"redistribute keeps the mesh: the tensor is on {spec.mesh!r}, not on {device_mesh!r}")
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
        return _pending(target, start_plan(local, plan, backward_dtype))
    if local.dtype == spec.dtype and backward_dtype is None:
        return wrap(redistribute_local(local, spec, target), target)
    if local.requires_grad and torch.is_grad_enabled():
        return wrap(move_as(local, plan, backward_dtype), target)
    return wrap(run_plan(local.to(spec.dtype), plan), target)


class _Pending(DTensor):
    """A DTensor with no ``_local`` yet. Becomes a ``DTensor`` when asked for it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name != "_local" or "_complete" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        local = self.__dict__.pop("_complete")()
        self.__class__ = DTensor  # type: ignore[assignment]  # the same slots; from here on it is one
        self._local = local
        return local

    def __reduce_ex__(self, protocol: Any) -> Any:
        _look(self)
        return DTensor.__reduce_ex__(self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        _look(self)
        return DTensor.__deepcopy__(self, memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        walk_tensors((args, kwargs or {}), _look)
        return DTensor.__torch_function__(func, types, args, kwargs)


def _look(tensor: Tensor) -> None:
    if isinstance(tensor, _Pending):
        tensor._local  # noqa: B018  # looking is what completes it


def _pending(spec: Spec, complete: Callable[[], Tensor]) -> DTensor:
    """Return a DTensor laid out as ``spec`` whose local tensor is ``complete()``, called when first needed."""
    result: DTensor = make_subclass(_Pending, spec.template)
    result._spec = spec
    result._copied_view = None
    result.__dict__["_complete"] = complete
    return result


def redistribute_input(tensor: DTensor, target: Spec, op: str) -> Tensor:
    """Return the local of ``tensor`` laid out as ``target``, because an operation needs it so."""
    if target is tensor._spec:
        return tensor._local
    return kept_order(moved_for(op, tensor._local, tensor._spec, target), target, tensor)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors: by ``partition_fn``, the rest replicated.

    Parameters that submodules share stay shared; those on the meta device stay there, sharded: see ``Module.to_empty``.

    ``input_fn(module, inputs, mesh)`` and ``output_fn(module, outputs, mesh)`` run around its forward and may return
    what takes the place of the inputs or the outputs. Without ``module`` they work too, with a ``FutureWarning``.

    ``RuntimeError`` if it was called on this module before: the functions would run twice.
    """
    mesh = mesh_or_current(device_mesh)
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(f"distribute_module was called on this {type(module).__name__} before: call it once")
    before = _around_forward("input_fn", input_fn)
    after = _around_forward("output_fn", output_fn)
    with keeping_shared_parameters(module):
        for name, part in module.named_modules():
            if partition_fn is not None:
                partition_fn(name, part, mesh)
            replicate_rest(part, mesh)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]  # a mark that torch's own has too
    return module


def _around_forward(name: str, given: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return ``given`` as a function of module, values and mesh, which may be written without the module."""
    if given is None:
        return None
    function = given
    takes = [count for count in (3, 2) if _takes(function, count)]
    if not takes:
        raise ValueError(
            f"distribute_module: {name}={given!r} takes {inspect.signature(function)}; "
            f"expected (module, {name[:-3]}s, device_mesh)"
        )
    if takes[0] == 3:
        return function
    warnings.warn(
        f"distribute_module: {name}({name[:-3]}s, device_mesh) is the old form: write "
        f"{name}(module, {name[:-3]}s, device_mesh)",
        FutureWarning,
        stacklevel=3,
    )
    return lambda module, values, mesh: function(values, mesh)


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the parameters and buffers of ``module`` itself that are plain tensors still."""
    for key, parameter in module_parameters(module).items():
        if parameter is not None and not isinstance(parameter, DTensor):
            distributed = distribute_tensor(parameter.detach(), mesh)
            module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))
    for key, buffer in module_buffers(module).items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module_buffers(module)[key] = distribute_tensor(buffer, mesh)
