"""Mistakes in sharding a module: each message names the parameter or module, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx import shard
from phalanx.comm import simulate
from phalanx.errors import RankFailed
from phalanx.shard import Shard, Sharder, ShardingPlan, shard_module, shard_parameter
from shard.layouts import chunk

pytestmark = pytest.mark.fast


class Same(Sharder):
    def shard(self, module):
        return module


def net() -> nn.Module:
    made = nn.Module()
    made.inner = nn.Linear(4, 6)
    made.inner.note = "text"
    made.inner.turned = torch.zeros(3, 4).t()
    made.tied = nn.Linear(4, 6)
    made.tied.weight = made.inner.weight
    return made


MISTAKES = {
    "missing parameter": (
        lambda rank: ShardingPlan({"inner.wait": chunk(2)}),
        AttributeError,
        ("'inner.wait'", "correct the name", "'weight', 'bias'"),
    ),
    "missing module": (
        lambda rank: ShardingPlan({"outer.weight": chunk(2)}),
        AttributeError,
        ("'outer.weight'", "correct the name", "'inner', 'tied'"),
    ),
    "missing module of a Sharder": (
        lambda rank: ShardingPlan({"outer": Same()}),
        AttributeError,
        ("Sharder of 'outer'", "correct the name"),
    ),
    "missing output": (
        lambda rank: ShardingPlan({}, output_plan={"outer": chunk(2)}),
        AttributeError,
        ("output_plan['outer']", "correct the name"),
    ),
    "missing collected output": (
        lambda rank: ShardingPlan({}, return_local_tensor=["outer"]),
        AttributeError,
        ("return_local_tensor, 'outer'", "correct the name"),
    ),
    "no tensor": (
        lambda rank: ShardingPlan({"inner.note": chunk(2)}),
        ValueError,
        ("Linear.note", "found str", "leave 'inner.note' out"),
    ),
    "not contiguous": (
        lambda rank: ShardingPlan({"inner.turned": chunk(2)}),
        ValueError,
        ("inner.turned", "call .contiguous()"),
    ),
    "two specs for one": (
        lambda rank: ShardingPlan({"inner.weight": chunk(2), "tied.weight": chunk(2, 1)}),
        ValueError,
        ("'inner.weight'", "'tied.weight'", "give both the same"),
    ),
    "dim": (lambda rank: ShardingPlan({"inner.weight": chunk(2, 7)}), ValueError, ("inner.weight", "dim 7")),
    "type": (
        lambda rank: ShardingPlan({"inner.weight": 0}),
        TypeError,
        ("'inner.weight'", "found int", "give it e.g. a ChunkShardingSpec"),
    ),
    "output type": (
        lambda rank: ShardingPlan({}, output_plan={"inner": 0}),
        TypeError,
        ("'inner'", "found int", "give it e.g. a ChunkShardingSpec"),
    ),
    "sharder for the root": (
        lambda rank: ShardingPlan({"": Same()}),
        KeyError,
        ("must not be empty", "Name the submodule"),
    ),
    "in a sharder's module": (
        lambda rank: ShardingPlan({"inner": Same(), "inner.weight": chunk(2)}),
        RuntimeError,
        ("'inner.weight'", "'inner'", "remove one of the two entries"),
    ),
    "specs differ": (
        lambda rank: ShardingPlan({"inner.bias": chunk(2), "inner.weight": chunk(2, rank)}),
        ValueError,
        ("inner.weight", "rank: 0", "rank: 1", "all ranks need the same plan"),
    ),
    "names differ": (
        lambda rank: ShardingPlan({f"{'inner' if rank else 'tied'}.bias": chunk(2)}),
        ValueError,
        ("inner.bias", "tied.bias", "all ranks need the same plan"),
    ),
    "counts differ": (
        lambda rank: ShardingPlan({name: chunk(2) for name in ("inner.bias", "inner.weight")[: rank + 1]}),
        ValueError,
        ("2 parameters", "1 parameters", "all ranks need the same plan"),
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_wrong_plan_changes_nothing_and_says_what_to_do(case) -> None:
    plan, kind, words = MISTAKES[case]

    def main(group):
        module = net()
        with pytest.raises(kind) as caught:
            shard_module(module, plan(group.rank))
        assert not any(isinstance(p, shard.ShardedTensor) for p in module.parameters())
        return str(caught.value)

    texts = simulate(2).run(main)
    assert not [word for word in words if word not in "\n".join(texts)], texts


def test_disagreeing_sources_are_named_with_the_remedy() -> None:
    def main(group):
        with pytest.raises(ValueError, match=r"src_rank.*pass the same src_rank on all ranks"):
            shard_parameter(nn.Linear(2, 2), "weight", chunk(2), src_rank=group.rank)

    simulate(2).run(main)


def test_sharding_twice_points_to_reshard() -> None:
    def main(group):
        module = nn.Linear(4, 4)
        shard_parameter(module, "weight", chunk(2))
        with pytest.raises(ValueError, match=r"param: weight is sharded already; call its reshard\(\)"):
            shard_parameter(module, "weight", chunk(2, 1))

    simulate(2).run(main)


def test_one_local_tensor_is_one_shard() -> None:
    """On a rank with several or none, the tensor would be used twice or lost."""

    def main(group, order, sizes):
        shard.ShardedTensor._init_from_local_tensor(torch.ones(2, 3), chunk(2, 0, order), sizes)

    with pytest.raises(RankFailed, match=r"gives this rank 2 shards.*use init_from_local_shards"):
        simulate(2).run(main, [0, 0, 1], [6, 3])
    with pytest.raises(RankFailed, match=r"rank 1: .*gives this rank 0 shards"):
        simulate(2).run(main, [0], [2, 3])


def test_shards_and_global_metadata_must_fit_each_other() -> None:
    def main(group):
        make = shard.ShardedTensor._init_from_local_shards_and_global_metadata
        metadata = shard.zeros(chunk(2), 4, 3).metadata()
        part = Shard.from_tensor_and_offsets(torch.zeros(2, 3), [2 * group.rank, 0], group.rank)
        elsewhere = Shard.from_tensor_and_offsets(torch.zeros(2, 3), [2 - 2 * group.rank, 0], group.rank)
        with pytest.raises(ValueError, match="is not the one of the global metadata"):
            make([elsewhere], metadata)
        with pytest.raises(RuntimeError, match=r"Number of local shards \(2\)"):
            make([part, part], metadata)
        learned = Shard.from_tensor_and_offsets(torch.zeros(2, 3, requires_grad=True), [2 * group.rank, 0], group.rank)
        with pytest.raises(ValueError, match="requires_grad property is incompatible"):
            make([learned], metadata)
        wrong = shard.ShardedTensorMetadata(metadata.shards_metadata, torch.Size([5, 3]))
        with pytest.raises(ValueError, match=r"nothing holds offsets \[4, 0\]"):
            make([part], wrong)
        with pytest.raises(ValueError, match="must not be empty"):
            make([], shard.ShardedTensorMetadata([], torch.Size([4, 3])))

    simulate(2).run(main)
