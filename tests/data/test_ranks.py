"""Samplers and groups: defaults from the current group, and the check that all ranks agree."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from phalanx.comm import simulate
from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, SamplerMismatch

pytestmark = pytest.mark.fast


def test_replicas_and_rank_come_from_the_current_group():
    def on_rank(group):
        sampler = ElasticDistributedSampler(range(10), shuffle=False)
        return sampler.num_replicas, sampler.rank, list(sampler)

    assert simulate(2).run(on_rank) == [(2, 0, [0, 2, 4, 6, 8]), (2, 1, [1, 3, 5, 7, 9])]


def test_one_of_the_two_may_be_given():
    def on_rank(group):
        by_rank = ElasticDistributedSampler(range(10), rank=0)
        by_count = ElasticDistributedSampler(range(10), num_replicas=5)
        return (by_rank.num_replicas, by_rank.rank), (by_count.num_replicas, by_count.rank)

    assert simulate(2).run(on_rank) == [((2, 0), (5, 0)), ((2, 0), (5, 1))]


def test_slots_come_from_the_current_group():
    def on_rank(group):
        return ElasticBatchSampler(range(10), num_slots=5, slot_batch_size=1).slots

    assert simulate(2).run(on_rank) == [(0, 1), (2, 3, 4)]


def test_more_workers_than_slots():
    def on_rank(group):
        sampler = ElasticBatchSampler(range(4), num_slots=2, slot_batch_size=1, shuffle=False)
        sampler.check_agreement()
        return len(sampler), list(sampler)

    assert simulate(3).run(on_rank) == [(0, []), (2, [[0], [2]]), (2, [[1], [3]])]


def test_torchs_default_group_counts_too():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sampler = ElasticDistributedSampler(range(10))
    finally:
        dist.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


def test_no_group_and_no_numbers_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match="there is no current group"):
        ElasticDistributedSampler(range(10))


def check(change, kind="replicas"):
    """What each of three ranks says after rank 1 did something different."""

    def on_rank(group):
        if kind == "replicas":
            sampler = ElasticDistributedSampler(range(90), group.size, group.rank)
        else:
            sampler = ElasticBatchSampler(range(90), 6, 2)
        if group.rank == 1:
            change(sampler)
        try:
            sampler.check_agreement(group)
        except SamplerMismatch as error:
            return str(error)
        return ""

    return simulate(3).run(on_rank)


def test_ranks_that_agree_pass():
    assert check(lambda sampler: None) == ["", "", ""]
    assert check(lambda sampler: None, "slots") == ["", "", ""]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.set_epoch(2), "rank 1 has epoch=2, rank 0 has epoch=0"),
        (lambda s: setattr(s, "seed", 5), "rank 1 has seed=5, rank 0 has seed=0"),
        (lambda s: next(iter(s)), "rank 1 has position=3, rank 0 has position=0"),
        (lambda s: s.resize(3, 2), "part 1 of 3 is taken by ranks [], expected one"),
        (lambda s: s.resize(4, 1), "rank 1 has num_replicas=4, rank 0 has num_replicas=3"),
    ],
)
def test_every_rank_hears_who_differs_in_what(change, expected):
    messages = check(change)
    for rank, message in enumerate(messages):
        assert expected in message
        assert f"seen on rank {rank} of 3" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.commit(0), "rank 1 has step=1, rank 0 has step=0"),
        (lambda s: s.carry([0, 3]), "part 0 of 6 is taken by ranks [0, 1]"),
        (lambda s: s.carry([3]), "part 2 of 6 is taken by ranks []"),
    ],
)
def test_slots_are_checked_too(change, expected):
    assert all(expected in message for message in check(change, "slots"))
