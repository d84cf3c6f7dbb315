"""Specs, placements and metadata: what is accepted, what is refused, and that it equals torch's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.shard import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    RemoteDevice,
    Shard,
    ShardMetadata,
    TensorProperties,
)
from phalanx.shard.tensor._sharding_spec import check_cover, check_no_overlap, infer_spec
from shard.layouts import chunk, random_specs

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("text", ["rank:0/cpu", "rank:3/cuda:1", "trainer0/cpu", "trainer0", "cpu", "cuda:1", "rank:7"])
def test_placements_read_like_those_of_torch(text: str) -> None:
    from torch.distributed import _remote_device

    ours, theirs = RemoteDevice(text), _remote_device(text)
    assert (ours.rank(), ours.worker_name(), ours.device()) == (
        theirs.rank(),
        theirs.worker_name(),
        theirs.device(),
    )
    assert repr(ours) == repr(theirs)
    assert RemoteDevice.of(theirs) == ours
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert len({ours, RemoteDevice(text)}) == 1


@pytest.mark.parametrize("text", ["rank:/cpu", "/cpu", "a/b/cpu", "rank:x/cpu", "a:b:c/cpu", "name:3/cpu", ""])
def test_placements_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        RemoteDevice(text)


def test_a_placement_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="int"):
        RemoteDevice(3)
    assert DevicePlacementSpec("cuda:1").device == RemoteDevice("cuda:1")


def test_chunk_spec_refuses_wrong_dims() -> None:
    with pytest.raises(NotImplementedError, match="named"):
        ChunkShardingSpec("N", ["rank:0/cpu"])
    with pytest.raises(ValueError, match="integer"):
        ChunkShardingSpec(0.5, ["rank:0/cpu"])
    with pytest.raises(ValueError, match="Invalid sharding dim"):
        chunk(2, 3).build_metadata(torch.Size([4, 4]), TensorProperties())
    with pytest.raises(ValueError, match="placements"):
        ChunkShardingSpec(0, []).build_metadata(torch.Size([4, 4]), TensorProperties())


def test_a_callers_list_is_not_changed() -> None:
    placements = ["rank:0/cpu"]
    ChunkShardingSpec(0, placements)
    assert placements == ["rank:0/cpu"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([0, 1, -1, -2]))
def test_chunk_metadata_equals_torchs(rows: int, num_ranks: int, dim: int) -> None:
    import torch.distributed._shard.sharding_spec as theirs
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TheirProperties

    placements = [f"rank:{r}/cpu" for r in range(num_ranks)]
    size = torch.Size([rows, 7])
    ours = chunk(num_ranks, dim).build_metadata(size, TensorProperties())
    wanted = theirs.ChunkShardingSpec(dim, placements).build_metadata(size, TheirProperties())
    assert ours.size == wanted.size
    for mine, other in zip(ours.shards_metadata, wanted.shards_metadata, strict=True):
        assert (mine.shard_offsets, mine.shard_sizes) == (other.shard_offsets, other.shard_sizes)
        assert repr(mine.placement) == repr(other.placement)


def test_shard_metadata_is_checked() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ShardMetadata([0], [1, 1], "rank:0/cpu")
    with pytest.raises(ValueError, match=">= 0"):
        ShardMetadata([-1], [1], "rank:0/cpu")
    with pytest.raises(ValueError, match=">= 0"):
        ShardMetadata([0], [-1], "rank:0/cpu")
    one = ShardMetadata([0, 5], [5, 5], "rank:0/cpu")
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(copy.deepcopy(one))
    assert ShardMetadata.from_json(one.to_json()) == one


def test_enumerable_spec_names_overlaps_gaps_and_bounds() -> None:
    a, b = ShardMetadata([0, 0], [2, 4], "rank:0/cpu"), ShardMetadata([1, 0], [3, 4], "rank:1/cpu")
    with pytest.raises(ValueError, match="overlap"):
        EnumerableShardingSpec([a, b])
    with pytest.raises(ValueError, match="empty list"):
        EnumerableShardingSpec([])
    with pytest.raises(ValueError, match="inconsistent ranks"):
        EnumerableShardingSpec([a, ShardMetadata([2], [2], "rank:1/cpu")])
    spec = EnumerableShardingSpec([a, ShardMetadata([2, 0], [2, 3], "rank:1/cpu")])
    with pytest.raises(ValueError, match=r"nothing holds offsets \[2, 3\]"):
        spec.build_metadata(torch.Size([4, 4]), TensorProperties())
    with pytest.raises(ValueError, match="exceeds tensor dim"):
        spec.build_metadata(torch.Size([3, 4]), TensorProperties())
    with pytest.raises(ValueError, match="Rank of tensor is 3"):
        spec.build_metadata(torch.Size([4, 4, 1]), TensorProperties())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_layout_covers_its_tensor_and_is_inferred_back(data) -> None:
    sizes = data.draw(st.sampled_from([(6, 5), (1, 4), (0, 3), (2, 3, 2)]))
    metadata = data.draw(random_specs(sizes, 3)).build_metadata(torch.Size(sizes), TensorProperties())
    check_no_overlap(metadata.shards_metadata)
    check_cover(metadata.shards_metadata, sizes)
    again = infer_spec(metadata.shards_metadata, sizes).build_metadata(torch.Size(sizes), TensorProperties())
    key = lambda shard: (shard.shard_offsets, shard.shard_sizes, repr(shard.placement))  # noqa: E731
    assert sorted(again.shards_metadata, key=key) == sorted(metadata.shards_metadata, key=key)


def test_infer_finds_chunks() -> None:
    shards = chunk(3, 1).build_metadata(torch.Size([4, 9]), TensorProperties()).shards_metadata
    assert infer_spec(list(reversed(shards)), (4, 9)) == chunk(3, 1)
    uneven = [ShardMetadata([0], [1], "rank:0/cpu"), ShardMetadata([1], [3], "rank:1/cpu")]
    assert isinstance(infer_spec(uneven, (4,)), EnumerableShardingSpec)


def test_a_shard_must_fit_its_metadata() -> None:
    with pytest.raises(ValueError, match="size does not match"):
        Shard(torch.zeros(2, 2), ShardMetadata([0, 0], [2, 3], "rank:0/cpu"))
    with pytest.raises(ValueError, match="device does not match"):
        Shard(torch.zeros(2, 2), ShardMetadata([0, 0], [2, 2], "rank:0/cuda:0"))
    made = Shard.from_tensor_and_offsets(torch.zeros(2, 2), [4, 0], rank=3)
    assert made.metadata == ShardMetadata([4, 0], [2, 2], "rank:3/cpu")


def test_tensor_properties_survive_pickling() -> None:
    kept = TensorProperties(torch.float16, requires_grad=True)
    assert pickle.loads(pickle.dumps(kept)) == kept
    kept.memory_format = torch.channels_last_3d
    with pytest.raises(RuntimeError, match="memory format"):
        pickle.dumps(kept)
