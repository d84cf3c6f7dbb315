"""What happens when a torch function meets a sharded tensor, as the table of operators says, in a fixed order.

Order: what users registered; what only reads metadata; handlers; with plain tensors that are each rank's own,
in full on every rank (``_per_rank``); element by element on the shards (``_shard_by_shard``); everything else as a
DTensor (``_convert``). Before the last two, plain tensors among the arguments are compared across ranks (``_plain``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from phalanx._torch_private import DisableTorchFunctionSubclass, calculate_correct_fan, tree_leaves
from phalanx.shard.ops import _shard_by_shard
from phalanx.shard.ops._convert import run_as_dtensor
from phalanx.shard.ops._custom_ops import custom_implementation
from phalanx.shard.ops._embedding import embedding, embedding_bag
from phalanx.shard.ops._per_rank import run_per_rank
from phalanx.shard.ops._plain import check_equal, current_policy, plain_tensors
from phalanx.shard.tensor._tensor import ShardedTensor, check_format, same_layout
from phalanx.tensor.ops._registry import OPERATORS, op_name


def dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out ``func`` on arguments of which at least one is a ShardedTensor."""
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor)), None)
    name = _name(func)
    if first is None:
        raise RuntimeError(f"torch function {name!r} came to ShardedTensor without one among its arguments")
    custom = custom_implementation(func, first._sharding_spec)
    if custom is not None:
        return custom(types, args, kwargs, first._process_group)
    operator = op_name(func)
    sharded = OPERATORS[operator.base].sharded
    if sharded == "metadata":  # the wrapper answers by itself: its shape and dtype, no data
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    handler = _BY_FUNCTION.get(func)
    if handler is None and operator.in_place == (sharded == "copy"):
        handler = getattr(_Handlers, sharded, None)
    if handler is not None:
        return handler(*args, **kwargs)
    if sharded == "no_memory":
        _refuse_memory(first, name)
    plain = plain_tensors(args, kwargs)
    if plain and current_policy() == "per_rank":
        return run_per_rank(func, args, kwargs)
    if plain and current_policy() == "verify":
        check_equal(first._process_group, name, plain)
    if sharded == "shards":
        result = _shard_by_shard.run_pointwise(func, args, kwargs, first)
        if result is not NotImplemented:
            return result
    return run_as_dtensor(func, args, kwargs, first)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        prefix = "" if name == "__get__" else "set "
        return prefix + str(getattr(getattr(func, "__self__", None), "__name__", name))
    return str(name)


def _detach(tensor: ShardedTensor) -> ShardedTensor:
    template = tensor._template().detach()
    return tensor._with_tensors([shard.tensor.detach() for shard in tensor.local_shards()], template)


def _clone(tensor: ShardedTensor, *, memory_format: torch.memory_format | None = None) -> ShardedTensor:
    check_format(memory_format)
    template = tensor._template()
    return tensor._with_tensors([shard.tensor.clone() for shard in tensor.local_shards()], template)


def _contiguous(tensor: ShardedTensor, memory_format: torch.memory_format | None = None) -> ShardedTensor:
    check_format(memory_format)
    return tensor  # shards are contiguous by the checks at their making


def _copy(tensor: Any, other: Any, non_blocking: bool = False) -> Any:
    """From the same layout shard by shard, from another layout by resharding a copy, from a plain tensor by slicing."""
    if not isinstance(tensor, ShardedTensor):
        raise TypeError("copy_ of a ShardedTensor into a plain tensor; gather() it into the tensor instead")
    if not isinstance(other, ShardedTensor) and current_policy() != "equal":
        # Which rank's values are meant cannot depend on the policy: an element of the result has one owner.
        check_equal(tensor._process_group, "copy_", plain_tensors((tensor, other), {}))
    if isinstance(other, ShardedTensor) and not same_layout(tensor, other):
        if other.shape != tensor.shape:
            raise RuntimeError(f"copy_ of a ShardedTensor of {tuple(other.shape)} into one of {tuple(tensor.shape)}")
        moved = _detach(other).reshard(tensor.sharding_spec())
        other = moved if same_layout(tensor, moved) else None
        if other is None:
            raise RuntimeError("inplace copy can only happen between ShardedTensors whose layouts can be made the same")
    if _shard_by_shard.run_pointwise(torch.Tensor.copy_, (tensor, other, non_blocking), {}, tensor) is NotImplemented:
        raise RuntimeError(f"copy_ of a tensor of {tuple(other.shape)} into a ShardedTensor of {tuple(tensor.shape)}")
    return tensor


def _compare(compare: Callable[..., bool]) -> Callable[..., bool]:
    """Compare shard by shard on every rank, and let all ranks hear the result."""

    def run(a: Any, b: Any, **kwargs: Any) -> bool:
        if not (isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor)):
            raise TypeError(f"Both arguments to torch.{compare.__name__} need to be of type ShardedTensor")
        if a._process_group.ranks != b._process_group.ranks or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not same_layout(a, b):
            b = _detach(b).reshard(a.sharding_spec())
        same = all(
            compare(one.tensor, other.tensor, **kwargs)
            for one, other in zip(a.local_shards(), b.local_shards(), strict=True)
        )
        verdict = torch.tensor([int(same)])
        a._process_group.all_reduce(verdict, "min")
        return bool(verdict.item())

    return run


def _set_data(tensor: ShardedTensor, value: Any) -> None:
    if not isinstance(value, ShardedTensor) or not same_layout(tensor, value):
        raise TypeError("the data of a ShardedTensor is a ShardedTensor of the same layout")
    for shard, other in zip(tensor.local_shards(), value.local_shards(), strict=True):
        shard.tensor.data = other.tensor.detach()
    properties = replace(tensor._metadata.tensor_properties, dtype=value.dtype)
    tensor._metadata = replace(value._metadata, tensor_properties=properties)


def _init_uniform(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Tensor:
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


def _init_normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def _init_constant(tensor: Tensor, val: float) -> Tensor:
    with torch.no_grad():
        return tensor.fill_(val)


def _init_kaiming_uniform(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Any = None,
) -> Tensor:
    fan = calculate_correct_fan(tensor, mode)
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]  # torch checks the name
    bound = 3.0**0.5 * gain / fan**0.5
    return _init_uniform(tensor, -bound, bound, generator)


def _refuse_memory(tensor: ShardedTensor, name: str) -> NoReturn:
    """Raise what torch raises for tensors without a storage: the shape is global, this rank's memory is not."""
    held = sum(shard.tensor.numel() for shard in tensor.local_shards())
    raise NotImplementedError(
        f"rank {tensor._process_group.rank}: {name}() of a ShardedTensor of {tuple(tensor.shape)}, of which this "
        f"rank holds {held} of {tensor.shape.numel()} elements: there is no memory of that shape. Use "
        f"local_shards() or gather(); phalanx.shard.save() and torch.distributed.checkpoint write shards to files"
    )


class _Handlers:
    """What runs the operators that the table gives a handler of this name (``Operator.sharded``)."""

    detach = staticmethod(_detach)
    set_data = staticmethod(_set_data)
    clone = staticmethod(_clone)
    contiguous = staticmethod(_contiguous)
    copy = staticmethod(_copy)
    equal = staticmethod(_compare(torch.equal))
    allclose = staticmethod(_compare(torch.allclose))
    embedding = staticmethod(embedding)
    embedding_bag = staticmethod(embedding_bag)

    @staticmethod
    def are_sharded(a: Any, b: Any) -> bool:
        return isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor)


_init = torch.nn.init
# These share their names with methods of Tensor, or have bodies that must not be entered twice.
_BY_FUNCTION: dict[Any, Callable[..., Any]] = {
    _init.uniform_: _init_uniform,
    _init.normal_: _init_normal,
    _init.constant_: _init_constant,
    _init.kaiming_uniform_: _init_kaiming_uniform,
}
