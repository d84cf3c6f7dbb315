"""Makes sharded tensors: ``empty``, ``zeros``, ``ones``, ``full``, ``rand``, ``randn``; every rank calls them.

Random values come from each rank's own torch generator, as in torch: seed the ranks differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.shard.exchange._shard import Shard
from phalanx.shard.tensor._sharding_spec import ShardingSpec
from phalanx.shard.tensor._tensor import ShardedTensor


def _make(
    fill: Callable[[Tensor], Any] | None, sharding_spec: ShardingSpec, *size: Any, **options: Any
) -> ShardedTensor:
    tensor = ShardedTensor(sharding_spec, *size, **options)
    if fill is not None:
        with torch.no_grad():
            for shard in tensor.local_shards():
                fill(shard.tensor)
    return tensor


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Uninitialised. Options of all factories: dtype, layout, requires_grad, pin_memory, memory_format, process_group.

    >>> table = empty(spec, 1000, 16)          # doctest: +SKIP
    """
    return _make(None, sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Filled with 0."""
    return _make(Tensor.zero_, sharding_spec, *size, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Filled with 1."""
    return _make(lambda t: t.fill_(1), sharding_spec, *size, **options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    """Filled with ``fill_value``; its dtype is the value's unless given."""
    options.setdefault("dtype", None)
    if options["dtype"] is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return _make(lambda t: t.fill_(fill_value), sharding_spec, size, **options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Uniform in [0, 1)."""
    return _make(Tensor.uniform_, sharding_spec, *size, **options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Standard normal."""
    return _make(Tensor.normal_, sharding_spec, *size, **options)


def init_from_local_shards(
    local_shards: list[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """Return one tensor from the shards that each rank holds; collective, with checks across ranks.

    With None in place of a dim on every rank the size is as large as the shards reach.

    >>> shard = Shard.from_tensor_and_offsets(torch.ones(2, 4), [2 * rank, 0], rank)    # doctest: +SKIP
    >>> tensor = init_from_local_shards([shard], [4, 4])                                # doctest: +SKIP
    """
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )
