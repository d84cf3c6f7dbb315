"""Layouts for tests: chunk specs, grids, and random cuts over any ranks."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from phalanx.shard import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata


def chunk(num_ranks: int, dim: int = 0, order=None) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order or range(num_ranks)])


def grid(sizes: tuple[int, int]) -> EnumerableShardingSpec:
    """Four ranks, two by two."""
    (h, w), shards = sizes, []
    for row, (top, height) in enumerate(((0, h // 2), (h // 2, h - h // 2))):
        for column, (left, width) in enumerate(((0, w // 2), (w // 2, w - w // 2))):
            shards.append(ShardMetadata([top, left], [height, width], f"rank:{2 * row + column}/cpu"))
    return EnumerableShardingSpec(shards)


@st.composite
def random_specs(draw, sizes: tuple[int, ...], num_ranks: int):
    """Chunks (also several per rank, and empty ones) or any guillotine cut, on any ranks."""
    ranks = st.integers(0, num_ranks - 1)
    if draw(st.booleans()):
        placements = draw(st.lists(ranks, min_size=1, max_size=num_ranks + 2))
        return chunk(num_ranks, draw(st.integers(-len(sizes), len(sizes) - 1)), placements)
    boxes = [([0] * len(sizes), list(sizes))]
    for _ in range(draw(st.integers(0, 5))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(sizes) - 1))
        at = draw(st.integers(0, lengths[dim]))
        low, high, moved = list(lengths), list(lengths), list(offsets)
        low[dim], high[dim], moved[dim] = at, lengths[dim] - at, offsets[dim] + at
        boxes += [(offsets, low), (moved, high)]
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{draw(ranks)}/cpu") for o, s in boxes])


def values(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element different."""
    count = int(torch.Size(sizes).numel())
    return torch.arange(count).reshape(sizes).to(dtype)


def gathered(tensor, dst: int = 0) -> torch.Tensor | None:
    out = torch.empty(tuple(tensor.shape), dtype=tensor.dtype) if tensor._process_group.rank == dst else None
    tensor.gather(dst, out)
    return out
