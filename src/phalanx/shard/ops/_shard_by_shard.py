"""Runs element by element on the local shards: no communication when the layouts agree.

Owns how their arguments are sharded; which operations work this way the table of operators says. A plain tensor among
the arguments stands for the same values on every rank: each shard sees its slice of it. If such a tensor needs a
gradient, every shard has a share of that too: then the operation is left to DTensors, which sum the shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import tree_map_only
from phalanx.shard.layout._boxes import Box, view_of
from phalanx.shard.tensor._tensor import ShardedTensor, same_layout
from phalanx.tensor.ops._registry import OPERATORS, op_name


def is_in_place(func: Any) -> bool:
    """Return whether ``func`` writes to its first argument and returns it."""
    name = op_name(func)
    return name.in_place and not OPERATORS[name.base].indexes


def run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: ShardedTensor) -> Any:
    """Return the result, or NotImplemented if the arguments do not line up shard by shard."""
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
    in_place = is_in_place(func)
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
    """Return the arguments as shard ``index`` sees them."""

    def local_slice(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return tensor.local_shards()[index].tensor
        if tensor.dim() == 0:
            return tensor
        return view_of(tensor.expand(first.shape), box, (0,) * len(box.offsets))

    return tree_map_only(Tensor, local_slice, tree)


def _templates(tree: Any, first: ShardedTensor) -> Any:
    def template(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return tensor._template()
        return tensor if tensor.dim() == 0 else tensor.new_empty((0,) * first.dim())

    return tree_map_only(Tensor, template, tree)
