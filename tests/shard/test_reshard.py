"""Resharding and distribution against slicing the whole tensor; bytes counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import shard
from phalanx.comm import observe, simulate
from phalanx.errors import RankFailed
from phalanx.shard.layout._boxes import intersect, view_of
from shard.layouts import chunk, gathered, grid, random_specs, values

pytestmark = pytest.mark.fast
NUM_RANKS = 3


def slices(whole, tensor):
    """The naive reference: cut this rank's shards out of the whole tensor."""
    return [view_of(whole, part.metadata.box, (0,) * whole.dim()) for part in tensor.local_shards()]


def bytes_that_must_move(before, after, rank, itemsize):
    """Of the larger side of this rank: what it holds and others need, what it needs and others hold."""
    sent = received = 0
    for source in before.shards_metadata:
        for target in after.shards_metadata:
            common = intersect(source.box, target.box)
            if common and source.placement.rank() != target.placement.rank():
                sent += common.volume * (source.placement.rank() == rank)
                received += common.volume * (target.placement.rank() == rank)
    return itemsize * max(sent, received)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_spec_to_any_spec_equals_slicing_and_moves_only_what_must(data) -> None:
    sizes = data.draw(st.sampled_from([(6, 5), (7,), (2, 3, 4), (0, 3), (1, 1)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.int16, torch.bool, torch.complex64, torch.bfloat16]))
    first, second = (data.draw(random_specs(sizes, NUM_RANKS)) for _ in range(2))
    whole = values(*sizes, dtype=dtype)

    def main(group):
        tensor = shard._shard_tensor(whole, first, src_rank=1, verify=False)
        assert all(torch.equal(p.tensor, s) for p, s in zip(tensor.local_shards(), slices(whole, tensor), strict=True))
        before, events = tensor.metadata(), []
        with observe(events.append):
            assert tensor.reshard(second) is tensor
        assert len(events) <= 1
        assert sum(event.nbytes for event in events) == bytes_that_must_move(
            before, tensor.metadata(), group.rank, dtype.itemsize
        )
        assert all(torch.equal(p.tensor, s) for p, s in zip(tensor.local_shards(), slices(whole, tensor), strict=True))
        assert tensor.sharding_spec() == second
        return gathered(tensor)

    assert torch.equal(simulate(NUM_RANKS).run(main)[0], whole)


def test_the_same_spec_moves_nothing() -> None:
    def main(group):
        tensor = shard.ones(chunk(2), 4, 2)
        local, events = tensor.local_tensor(), []
        with observe(events.append):
            tensor.reshard(chunk(2))
            assert tensor.local_tensor() is local
            tensor.reshard(shard.EnumerableShardingSpec(tensor.metadata().shards_metadata))
        return events

    assert simulate(2).run(main) == [[], []]


def test_parameters_stay_leaves() -> None:
    def main(group):
        tensor = shard._shard_tensor(values(4, 4).requires_grad_(), chunk(4))
        tensor.reshard(grid((4, 4)))
        assert tensor.requires_grad
        assert tensor.local_tensor().is_leaf
        assert tensor.local_tensor().requires_grad

    simulate(4).run(main)


def test_gradients_flow_through_a_reshard() -> None:
    whole = values(4, 6)

    def main(group):
        leaf = shard._shard_tensor(whole.clone().requires_grad_(), chunk(2))
        computed = (leaf * 2).reshard(chunk(2, 1))
        weights = slices(whole, computed)[0]
        (computed.local_tensor() * weights).sum().backward()
        return gathered(leaf.grad)

    assert torch.equal(simulate(2).run(main)[0], 2 * whole)


def test_a_computed_tensor_may_not_leave_a_rank_without_shards() -> None:
    def main(group):
        leaf = shard.ones(chunk(2), 4, 2, requires_grad=True)
        (leaf * 2).reshard(chunk(2, 0, [1]))

    with pytest.raises(RankFailed, match=r"ranks \[0\] of the group hold none after"):
        simulate(2).run(main)


def test_wrong_spec_is_refused() -> None:
    with pytest.raises(RankFailed, match="Expecting ShardingSpec"):
        simulate(1).run(lambda group: shard.ones(chunk(1), 4).reshard("rows"))


def test_on_a_subgroup_placements_are_global_ranks() -> None:
    def main(group):
        part = group.subgroup([2, 0])
        if part is None:
            return None
        spec = shard.ChunkShardingSpec(0, ["rank:0/cpu", "rank:2/cpu"])
        tensor = shard._shard_tensor(values(4, 2), spec, src_rank=0, process_group=part)
        tensor.reshard(shard.ChunkShardingSpec(1, ["rank:2/cpu", "rank:0/cpu"]))
        return tensor.local_tensor().tolist()

    assert simulate(3).run(main) == [[[1], [3], [5], [7]], None, [[0], [2], [4], [6]]]
