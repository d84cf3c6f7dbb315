"""Cutting parameters into buckets: pure."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.ddp.buckets._assignment import (
    MIB,
    Caps,
    CommCost,
    ParamInfo,
    assign_buckets,
    choose_caps,
    complete_order,
    finish_time,
)

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
INFOS = st.lists(
    st.builds(
        ParamInfo,
        numel=st.integers(0, 300),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        device=st.just(CPU),
        sparse=st.booleans(),
    ),
    max_size=30,
)


@given(INFOS, st.randoms(), st.lists(st.integers(1, 2000), min_size=1, max_size=3))
def test_every_dense_parameter_is_in_one_bucket_of_its_dtype(infos, random, sizes):
    order = list(range(len(infos)))
    random.shuffle(order)
    caps = Caps(tuple(sizes), True)
    buckets = assign_buckets(infos, order, caps)
    assert sorted(i for bucket in buckets for i in bucket) == [i for i, info in enumerate(infos) if not info.sparse]
    place = {index: k for k, index in enumerate(order)}
    for bucket in buckets:
        assert len({infos[i].dtype for i in bucket}) == 1
        assert [place[i] for i in bucket] == sorted(place[i] for i in bucket)
        # Without its last member no bucket had reached any cap yet.
        assert sum(infos[i].nbytes for i in bucket[:-1]) < max(sizes)
    assert [place[bucket[-1]] for bucket in buckets] == sorted(place[bucket[-1]] for bucket in buckets)


@given(st.lists(st.integers(0, 9)), st.just(10))
def test_an_order_is_completed_to_a_permutation(observed, count):
    order = complete_order(observed, count)
    assert sorted(order) == list(range(count))
    assert order[: len(set(observed))] == list(dict.fromkeys(observed))


def test_caps_from_the_constructors_arguments():
    assert Caps.from_options(None, None) == Caps((MIB, 25 * MIB), False)
    assert Caps.from_options(2, None) == Caps((2 * MIB,), True)
    assert Caps.from_options(None, [1, 3]) == Caps((MIB, 3 * MIB), True)
    assert [Caps((1, 3), True).at(i) for i in range(4)] == [1, 3, 3, 3]


def test_collectives_run_one_after_the_other_and_never_before_they_are_ready():
    cost = CommCost(latency=1.0, bandwidth=10.0)
    assert finish_time([0.0, 5.0], [10, 20], [1, 1], cost) == 5.0 + 1.0 + 2.0
    assert finish_time([0.0, 1.0], [10, 20], [1, 1], cost) == 2.0 + 1.0 + 2.0
    assert finish_time([0.0, 5.0], [10, 20], [2], cost) == 5.0 + 1.0 + 3.0


def test_small_buckets_are_chosen_when_they_overlap_and_large_ones_when_latency_rules():
    nbytes = [4 * MIB] * 21
    spread = [0.1 * k for k in range(21)]
    cheap = choose_caps(spread, nbytes, CommCost(latency=1e-5, bandwidth=1e9))
    assert cheap.sizes[-1] <= 4 * MIB
    at_once = choose_caps([0.0] * 21, nbytes, CommCost(latency=1.0, bandwidth=1e9))
    assert at_once.sizes[-1] == 100 * MIB


def test_without_spare_cores_only_large_buckets_are_considered():
    nbytes, spread = [4 * MIB] * 21, [0.1 * k for k in range(21)]
    cost = CommCost(latency=1e-5, bandwidth=1e9)
    assert choose_caps(spread, nbytes, cost, spare_cores=False).sizes == (25 * MIB,)
    dear = CommCost(latency=1.0, bandwidth=1e9)
    assert choose_caps([0.0] * 21, nbytes, dear, spare_cores=False).sizes == (100 * MIB,)
