"""Element by element on the local shards: no communication when the layouts agree.

Owns the names of the operations that work this way and how their arguments are cut. A plain tensor among the
arguments stands for the same values on every rank: each shard sees its part of it. If such a tensor needs a gradient,
every shard has a part of that too: then the operation is left to DTensors, which sum the parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import tree_map_only
from phalanx.shard.layout._boxes import Box, view_of
from phalanx.shard.tensor._tensor import ShardedTensor, same_layout

_PLAIN_TEXT = """
abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj
copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor
floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish
hardtanh heaviside hypot isclose isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp less
less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not
logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne
neg negative nextafter not_equal pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn
sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh
tanhshrink threshold true_divide trunc where xlogy zero fill uniform normal exponential bernoulli random
float double half bfloat16 int long short bool char byte type_as zeros_like ones_like full_like
empty_like rand_like randn_like
"""
_PLAIN = _PLAIN_TEXT.split()
_DUNDER_TEXT = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod
pow rpow ipow neg pos abs invert and rand iand or ror ior xor rxor ixor lshift rshift eq ne lt le gt ge
"""
_DUNDER = _DUNDER_TEXT.split()
NAMES = frozenset([*_PLAIN, *(f"{name}_" for name in _PLAIN), *(f"__{name}__" for name in _DUNDER)])


def is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


def run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: ShardedTensor) -> Any:
    """The result, or NotImplemented if the arguments do not line up shard by shard."""
    tensors = _tensors((args, kwargs))
    if kwargs.get("out") is not None:
        raise NotImplementedError(f"{func.__name__}(out=...) of a ShardedTensor: assign the result instead")
    if torch.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors)) != tuple(first.shape):
        return NotImplemented
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor) and not same_layout(tensor, first):
            return NotImplemented
    if torch.is_grad_enabled() and any(
        tensor.requires_grad and not isinstance(tensor, ShardedTensor) for tensor in tensors
    ):
        return NotImplemented
    in_place = is_in_place(func.__name__)
    if in_place and args[0] is not first:
        raise TypeError(f"{func.__name__} would write a ShardedTensor into a plain tensor; gather() it first")
    results = [
        func(
            *_local(args, first, index, shard.metadata.box),
            **_local(kwargs, first, index, shard.metadata.box),
        )
        for index, shard in enumerate(first.local_shards())
    ]
    if in_place:
        return first
    if not results:
        tried = func(*_templates(args, first), **_templates(kwargs, first))
        return first._with_tensors([], tried)
    return first._with_tensors(results)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def _local(tree: Any, first: ShardedTensor, index: int, box: Box) -> Any:
    """The arguments as shard ``index`` sees them."""

    def part(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return tensor.local_shards()[index].tensor
        if tensor.dim() == 0:
            return tensor
        return view_of(tensor.expand(first.shape), box, (0,) * len(box.offsets))

    return tree_map_only(Tensor, part, tree)


def _templates(tree: Any, first: ShardedTensor) -> Any:
    def template(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return tensor._template()
        return tensor if tensor.dim() == 0 else tensor.new_empty((0,) * first.dim())

    return tree_map_only(Tensor, template, tree)
