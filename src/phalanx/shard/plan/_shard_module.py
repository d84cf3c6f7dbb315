"""Shards tensors, parameters and modules; hooks modules' outputs and state dicts.

Owns the functions that users call. Every rank calls them with the same arguments; the data is the source rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from phalanx.shard.exchange._groups import as_group
from phalanx.shard.plan._sharding_plan import Sharder, ShardingPlan, check_plan
from phalanx.shard.tensor._from_one_rank import Request, distribute_many, distribute_one
from phalanx.shard.tensor._sharding_spec import ChunkShardingSpec, ShardingSpec
from phalanx.shard.tensor._tensor import ShardedTensor


def _shard_tensor(
    tensor: Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Any = None,
    *,
    verify: bool = True,
) -> ShardedTensor:
    """Return a sharded tensor from ``tensor`` of rank ``src_rank`` of the group.

    Raises:
        ValueError: the tensor is not contiguous, or the ranks disagree on spec, size or source (with ``verify``).
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"input tensor is not a contiguous Tensor: its strides are {tensor.stride()}; call .contiguous() first"
        )
    group = as_group(process_group)
    if _shards_itself(sharding_spec):
        return sharding_spec.shard(tensor, src_rank=src_rank, process_group=group)
    return distribute_one(tensor, sharding_spec, src_rank, group, verify=verify)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Any = None,
    *,
    verify: bool = True,
) -> None:
    """Replace ``module.<param_name>`` by a ShardedTensor parameter.

    >>> shard_parameter(model.table, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))  # doctest: +SKIP

    Raises:
        AttributeError: the module has no such attribute.
        ValueError: it is not a contiguous tensor, or the ranks disagree.
    """
    tensor = _attribute(module, param_name, param_name)
    _replace(module, param_name, _shard_tensor(tensor, sharding_spec, src_rank, process_group, verify=verify))


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: Any = None,
    *,
    verify: bool = True,
) -> None:
    """Shard a module as the plan says: parameters, submodules with a ``Sharder``, then outputs.

    All parameters are checked across ranks together and sent in as few rounds as their bytes need. A parameter that is
    shared by several modules stays shared.

    >>> shard_module(model, ShardingPlan(plan={"embedding.weight": spec}))        # doctest: +SKIP
    """
    check_plan(plan)
    group = as_group(process_group)
    places: list[tuple[nn.Module, str]] = []
    requests: list[Request] = []
    for name, spec in plan.plan.items():
        if isinstance(spec, ShardingSpec):
            path, _, attribute = name.rpartition(".")
            owner = _submodule(module, path, f"to shard '{name}'")
            places.append((owner, attribute))
            requests.append(Request(name, _attribute(owner, attribute, name), spec))
    for name in plan.output_plan or ():
        _submodule(module, name, f"whose output to reshard (output_plan['{name}'])")
    for name in plan.return_local_tensor or ():
        _submodule(module, name, f"whose output to collect (return_local_tensor, '{name}')")
    for name, spec in plan.plan.items():
        if isinstance(spec, Sharder):
            _submodule(module, name, f"for the Sharder of '{name}'")
    sharded = _shard_shared(requests, src_rank, group, verify)
    for (owner, attribute), parameter in zip(places, sharded, strict=True):
        _replace(owner, attribute, parameter)
    for name, spec in plan.plan.items():
        if isinstance(spec, Sharder):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, spec.shard(module.get_submodule(name)))
    for name, output in (plan.output_plan or {}).items():
        _reshard_output(module.get_submodule(name), output)
    for name in plan.return_local_tensor or ():
        _collect_local_shard(module.get_submodule(name))


def _submodule(module: nn.Module, path: str, purpose: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        known = ", ".join(repr(name) for name, _ in module.named_children()) or "none"
        raise AttributeError(
            f"{type(module).__name__} has no submodule '{path}' {purpose}: {error}; correct the name in the plan "
            f"(children: {known})"
        ) from error


def _shard_shared(
    requests: Sequence[Request], src_rank: int, group: Any, verify: bool
) -> list[ShardedTensor | nn.Parameter]:
    """Shard each distinct tensor once."""
    first: dict[int, Request] = {}
    for request in requests:
        other = first.setdefault(id(request.tensor), request)
        if other.spec != request.spec:
            raise ValueError(
                f"'{other.name}' and '{request.name}' are one shared parameter, but the plan gives them different "
                f"specs; give both the same"
            )
    distinct = list(first.values())
    together = [request for request in distinct if not _shards_itself(request.spec)]
    made = dict(
        zip(
            (id(r.tensor) for r in together),
            distribute_many(together, src_rank, group, verify=verify),
            strict=True,
        )
    )
    for request in distinct:
        if id(request.tensor) not in made:
            made[id(request.tensor)] = request.spec.shard(request.tensor, src_rank=src_rank, process_group=group)
    parameters = {key: _as_parameter(first[key].tensor, tensor) for key, tensor in made.items()}
    return [parameters[id(request.tensor)] for request in requests]


def _shards_itself(spec: ShardingSpec) -> bool:
    """Return whether a user's spec brings its own way to shard."""
    return type(spec).shard is not ShardingSpec.shard


def _attribute(module: nn.Module, attribute: str, name: str) -> Tensor:
    if not hasattr(module, attribute):
        known = ", ".join(repr(known) for known, _ in module.named_parameters(recurse=False)) or "none"
        raise AttributeError(
            f"{type(module).__name__} has no attribute `{attribute}` to shard '{name}'; correct the name "
            f"(its parameters: {known})"
        )
    tensor = getattr(module, attribute)
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"Expected {type(module).__name__}.{attribute} to be a Tensor, but found {type(tensor).__name__}; "
            f"leave '{name}' out of what is sharded"
        )
    if isinstance(tensor, ShardedTensor):
        raise ValueError(f"param: {name} is sharded already; call its reshard() to move it to another spec")
    if not tensor.is_contiguous():
        raise ValueError(f"param: {name} is not a contiguous Tensor; call .contiguous() on it first")
    return tensor


def _as_parameter(tensor: Tensor, sharded: ShardedTensor) -> ShardedTensor | nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(sharded, requires_grad=tensor.requires_grad)
    return sharded


def _replace(module: nn.Module, attribute: str, sharded: Tensor) -> None:
    old = getattr(module, attribute)
    if isinstance(old, nn.Parameter):
        parameter = sharded if isinstance(sharded, nn.Parameter) else nn.Parameter(sharded, old.requires_grad)
        module.register_parameter(attribute, parameter)
    else:
        setattr(module, attribute, sharded)


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Bring the module's sharded output to ``resharding_spec`` after every forward."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Return the local tensor of the module's sharded output.

    If it was sharded by a ``ChunkShardingSpec`` and the local tensor has size 1 there, that dim is removed:
    a [4, 16] tensor on 4 ranks comes out as [16] on each.
    """

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return None
        local, spec = output.local_tensor(), output.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and local.size(spec.dim) == 1:
            local = local.squeeze(spec.dim)
        return local

    module.register_forward_hook(hook)
    return module


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """For ``_register_state_dict_hook``: adds sharded tensors that are plain attributes of modules."""
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor):
                destination[_key(prefix + path, name)] = value


def pre_load_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *ignored: Any) -> None:
    """For ``_register_load_state_dict_pre_hook(..., with_module=True)``: puts those attributes back."""
    for path, submodule in module.named_modules():
        for name in list(vars(submodule)):
            value = state_dict.get(_key(prefix + path, name))
            if isinstance(value, ShardedTensor):
                setattr(submodule, name, value)


def _key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
