"""Large results: reductions in place, also into a part of their own input, on slots of any size."""

from __future__ import annotations

import pytest
import torch

from comm.shm.test_random import TINY, on_threads
from phalanx.comm import Group, ReduceOp
from phalanx.comm.transports._tree_reduce import tree_reduce
from phalanx.comm.transports.shm._fold import Fold


@pytest.mark.fast
@pytest.mark.parametrize("position", range(5))
def test_a_reduction_may_go_into_any_one_of_its_values(position: int) -> None:
    values = [torch.randn(33) for _ in range(5)]
    expected = tree_reduce(values, ReduceOp.SUM)
    Fold(ReduceOp.SUM, torch.float32, 5).into(values[position], values)
    assert torch.equal(values[position], expected)


@pytest.mark.fast
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_into_its_own_input(size: int, shared: bool) -> None:
    """As who keeps one flat gradient does: the shard is a view of the whole."""
    inputs = [torch.randn(size * 700, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def main(group: Group) -> torch.Tensor:
        whole = group.shared_empty((size * 700,), torch.float32) if shared else torch.empty(size * 700)
        whole.copy_(inputs[group.rank])
        own = whole.view(size, -1)[group.rank]
        group.reduce_scatter_tensor(own, whole)
        group.barrier()
        return own.clone()

    expected = tree_reduce(inputs, ReduceOp.SUM).view(size, -1)
    for found, row in zip(on_threads(size, main, **TINY), expected, strict=True):
        assert torch.equal(found, row)
