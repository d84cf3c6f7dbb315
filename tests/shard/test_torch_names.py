"""The sharding API as torch's users meet it: module names, and what torch's own values do with ours."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _remote_device

from phalanx import shard
from phalanx.comm import simulate
from phalanx.errors import RankFailed
from processes import Worker, run_processes

MODULES = {
    "api": "load_with_process_group shard_module shard_parameter",
    "metadata": "ShardMetadata",
    "sharded_optim": "ShardedOptimizer named_params_with_sharded_tensor",
    "sharded_tensor": "Shard ShardMetadata ShardedTensor ShardedTensorMetadata TensorProperties empty full ones rand "
    "randn zeros custom_sharded_op_impl init_from_local_shards pre_load_state_dict_hook state_dict_hook",
    "sharder": "Sharder",
    "sharding_plan": "ShardingPlan ShardingPlanner",
    "sharding_spec": "ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata "
    "ShardingSpec",
}


@pytest.mark.fast
@pytest.mark.parametrize("module", MODULES)
def test_torchs_module_names(module: str) -> None:
    theirs = importlib.import_module(f"torch.distributed._shard.{module}")
    ours = importlib.import_module(f"phalanx.shard.{module}")
    for name in MODULES[module].split():
        assert hasattr(theirs, name)
        assert getattr(ours, name) is getattr(shard, name)


@pytest.mark.fast
def test_placements_equal_torchs_remote_devices_both_ways() -> None:
    for text in ("rank:1/cpu", "rank:2/cuda:0", "trainer0/cpu", "cpu"):
        ours, theirs = shard.RemoteDevice(text), _remote_device(text)
        assert ours == theirs
        assert theirs == ours
        assert hash(ours) == hash(theirs)
        assert {ours} == {theirs}
        assert shard.ShardMetadata([0], [4], theirs) == shard.ShardMetadata([0], [4], text)
        for other in ("rank:3/cpu", "rank:1/cuda:1", "trainer1/cpu", "cuda:1"):
            assert ours != _remote_device(other)
            assert _remote_device(other) != ours
    assert shard.RemoteDevice("cpu") != "cpu"


def test_the_size_follows_from_the_shards() -> None:
    def main(group: Any, *size: Any) -> Any:
        mine = shard.Shard.from_tensor_and_offsets(torch.full((2, 3), 1.0), [2 * group.rank, 0], group.rank)
        return tuple(shard.init_from_local_shards([mine], *size).size())

    for size in ((None, None), (None,), (None, 3)):
        assert simulate(3).run(main, *size) == [(6, 3)] * 3

    def some_know(group: Any) -> Any:
        return main(group, *((None, None) if group.rank else (6, 3)))

    with pytest.raises(RankFailed, match="global_size property does not match"):
        simulate(3).run(some_know)

    def with_a_hole(group: Any) -> Any:
        mine = shard.Shard.from_tensor_and_offsets(torch.ones(1, 3), [2 * group.rank, 0], group.rank)
        return shard.init_from_local_shards([mine], None, None)

    with pytest.raises(RankFailed, match="does not match tensor volume"):
        simulate(2).run(with_a_hole)


def on_two_of_three(worker: Worker) -> list[Any]:
    store = worker.store().namespace("subset").as_c10d()
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.size)
    subset = dist.new_group([1, 2])
    tensor = shard.ones(shard.ChunkShardingSpec(0, ["rank:1/cpu", "rank:2/cpu"]), 4, 3, process_group=subset)
    found: list[Any] = [tuple(tensor.size()), len(tensor.local_shards())]
    if worker.rank:
        out = torch.empty(4, 3) if worker.rank == 1 else None
        tensor.gather(0, out)
        return [*found, None if out is None else out.sum().item()]
    with pytest.raises(RuntimeError, match="not in that group"):
        tensor.gather(0, torch.empty(4, 3))
    dist.destroy_process_group()
    return found


def test_a_rank_outside_the_group_holds_nothing() -> None:
    found = [outcome.value for outcome in run_processes(3, on_two_of_three)]
    assert found == [[(4, 3), 0], [(4, 3), 1, 12.0], [(4, 3), 1, None]]


@pytest.mark.fast
def test_an_implementation_takes_four_arguments() -> None:
    def three(types: Any, args: Any, kwargs: Any) -> None: ...

    def five(types: Any, args: Any, kwargs: Any, process_group: Any, more: Any) -> None: ...

    for register in (
        shard.custom_sharded_op_impl(torch.igamma),
        shard.custom_sharding_spec_op(shard.ChunkShardingSpec, torch.igamma),
    ):
        for wrong in (three, five):
            with pytest.raises(TypeError, match=r"called with \(types, args, kwargs, process_group\), but takes"):
                register(wrong)
        with pytest.raises(TypeError, match="callable"):
            register(3)  # type: ignore[arg-type]  # on purpose
