"""``fully_shard``: takes a module's parameters together as one unit and shards them.

Owns the call: which parameters belong to the unit, checks, and the class that the module gets. What happens then is in
``fsdp/unit`` and ``fsdp/schedule``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn

from phalanx._devices import device_of_engine, is_host, of, place_of
from phalanx._torch_private import module_parameters
from phalanx.comm import DeviceMesh, Group, current_group, init_device_mesh
from phalanx.comm.group._init import has_current_group
from phalanx.comm.stores import MemoryStore
from phalanx.fsdp._module import FSDPModule
from phalanx.fsdp._policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from phalanx.fsdp._taken import mark_taken, taken_by
from phalanx.fsdp.schedule._module_state import ModuleState, UnitSettings, state_of
from phalanx.fsdp.unit._mesh_axes import DataParallelAxes, axes_of, block_group
from phalanx.fsdp.unit._parameter import ManagedParameter
from phalanx.fsdp.unit._section import UnitPlace
from phalanx.fsdp.unit._unit import Unit
from phalanx.protocol import ENV_ON_FAILURE
from phalanx.tensor import Shard
from phalanx.world import World

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]
M = TypeVar("M", bound=nn.Module)

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


@contextmanager
def _told_by_rank() -> Iterator[None]:
    """Begin what is said of a mistake with the rank that made it: others may have built another model."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if error.args and not str(error.args[0]).startswith("rank "):
            rank = current_group().rank if has_current_group() else World.from_env().rank
            error.args = (f"rank {rank}: {error.args[0]}", *error.args[1:])
        raise


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> M: ...
@overload
def fully_shard(
    module: list[M],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[M]: ...
@_told_by_rank()
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # a value
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # a value
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` (or of a list of modules, as one unit) that no earlier call has taken.

    Call it bottom up: on every block, then on the whole model. Each call makes one unit: gathered before the module's
    forward, freed after it (``reshard_after_forward``; default: except for the root), gathered again in backward, its
    gradients averaged over the ranks into those of the shards. Between uses ``module.parameters()`` are DTensors,
    sharded on dim 0 (or what ``shard_placement_fn`` says of a parameter). ``mesh`` has one axis, or two: (replicate,
    shard). Make the optimizer afterwards.

    >>> for block in model.blocks:                                   # doctest: +SKIP
    ...     fully_shard(block)
    >>> fully_shard(model)                                           # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters())            # doctest: +SKIP
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    axes = axes_of(mesh if mesh is not None else _default_mesh(modules), dp_mesh_dims)
    after_forward, block = _after_forward(reshard_after_forward, axes)
    device = place_of(axes.mesh.device_type)
    _check_offload(offload_policy, device)
    found = _own_parameters(modules, ignored_params or set())
    managed = [
        ManagedParameter(name, places, parameter, axes, _shard_dim(shard_placement_fn, parameter, name), device)
        for parameter, (name, places) in found.items()
    ]
    unit = None
    if managed:
        kept = torch.device("cpu") if isinstance(offload_policy, CPUOffloadPolicy) else device
        place = UnitPlace(
            group=axes.shard_group,
            block=None if block is None else block_group(axes.shard_group, block),
            device=device,
            shard_device=kept,
            precision=mp_policy,
        )
        unit = Unit(_class_names(modules), modules[0], managed, place)
        for made in managed:
            made.register(made.sharded)
        mark_taken({original: f"{unit.path}.{made.name}" for original, made in zip(found, managed, strict=True)})
        unit.bring_home(required=False)
    _move_buffers(modules, device)
    settings = UnitSettings(reshard_after_forward=after_forward)
    ModuleState(modules, unit, mp_policy, axes.replicate_group, settings)
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list; expected a module or several")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got a {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard of a {type(module).__name__}, which has no forward that could gather it: call it on each "
                f"of its modules, or on the list of them as one unit"
            )
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was called on this {type(module).__name__} already")


def _check_offload(policy: OffloadPolicy, device: torch.device) -> None:
    if isinstance(policy, CPUOffloadPolicy) and not is_host(device):
        raise NotImplementedError(
            f"CPUOffloadPolicy on a mesh of {device.type!r} devices: shards in the host's memory would be sent and "
            f"summed over a transport for {device.type!r}, which was never tried. Use OffloadPolicy(), or a mesh of "
            f"'cpu', whose shards are in the host's memory anyhow"
        )


def _default_mesh(modules: Sequence[nn.Module]) -> DeviceMesh:
    """Return the mesh of all ranks, on the devices that their parameters are on."""
    heals = os.environ.get(ENV_ON_FAILURE) == "heal"
    if not has_current_group() and (heals or World.from_env().size == 1):
        # Alone, or a worker that may lose its peers: an elastic job brings it together with them when it begins.
        return DeviceMesh.from_group(Group.create(MemoryStore(), 0, 1), "cpu")
    group = current_group()
    kinds = {parameter.device.type for module in modules for parameter in module.parameters()}
    only = kinds.pop() if len(kinds) == 1 else ""
    kind = only if only and of(only).count() else device_of_engine(group.backend).type
    return init_device_mesh(kind, (group.size,))


def _after_forward(given: bool | int | None, axes: DataParallelAxes) -> tuple[bool | None, int | None]:
    """Return whether to free whole parameters after forward, and the number of ranks to keep them on."""
    if given is None or isinstance(given, bool):
        return given, None
    size = axes.shard_group.size
    if not isinstance(given, int) or not 1 < given < size or size % given:
        raise ValueError(
            f"reshard_after_forward={given!r} on {size} ranks; expected a bool, or a number of ranks that divides "
            f"{size}, larger than 1 and smaller than {size}"
        )
    return True, given


def _own_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]]:
    """Return the parameters that belong to this unit, with name and places: no lower unit has them."""
    found: dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in _managed_modules(modules):
        for key, parameter in module_parameters(module).items():
            if parameter is None or parameter in ignored:
                continue
            name = f"{prefix}.{key}".lstrip(".")
            _check_parameter(parameter, name)
            found.setdefault(parameter, (name, []))[1].append((module, key))
    return found


def _managed_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below, without those of lower units."""
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module, top: bool) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or (not top and state_of(module) is not None):
            return
        seen.add(module)
        yield prefix, module
        for name, child in module.named_children():
            yield from walk(f"{prefix}.{name}".lstrip("."), child, False)

    for module in modules:
        yield from walk("", module, True)


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    taken = taken_by(parameter)
    if taken is not None:
        raise ValueError(
            f"parameter {name!r} is shared with {taken}, which an earlier fully_shard took: two units "
            f"would train it apart. Put both modules into one unit, fully_shard([a, b]), or leave both to their parent"
        )
    if not parameter.dim():
        raise ValueError(
            f"parameter {name!r} is a 0-d tensor, which has no dim to shard: make it a tensor of shape (1,)"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter {name!r} has no shape yet: run the lazy module once before fully_shard")


def _shard_dim(choose: ShardPlacementFn | None, parameter: nn.Parameter, name: str) -> int:
    chosen = None if choose is None else choose(parameter)
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard) or type(chosen) is not Shard:
        raise TypeError(
            f"shard_placement_fn returned {chosen!r} for {name!r}; expected phalanx.tensor.Shard, or None for Shard(0)"
        )
    dims = parameter.dim()
    if not -dims <= chosen.dim < dims:
        raise ValueError(f"shard_placement_fn returned {chosen!r} for {name!r}, which has {dims} dims")
    return chosen.dim % dims


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for _, module in _managed_modules(modules):
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def _class_names(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _sharded_class(original: type) -> type:
    """Return the class whose methods are those of ``FSDPModule`` first, then those of ``original``."""
    known = _classes.get(original)
    if known is None:
        known = _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return known
