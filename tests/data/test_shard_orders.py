"""Orders over shards: every sample once, few shards at a time, well mixed, and never another order than before."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from phalanx.data import (
    Concatenated,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    MixedOrder,
    ShardedDataset,
    ShardOrder,
    ShardTable,
    Shuffled,
)
from sharded_samples import Numbers

pytestmark = pytest.mark.fast

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
SMALL = st.integers(1, 8)
SIX = [2] * 6


class Sized:
    """A dataset that is nothing but its shards."""

    def __init__(self, sizes):
        self.shards = ShardTable(sizes)

    def __len__(self):
        return self.shards.length


def all_of(order, seed=0, epoch=0):
    return order.at(seed, epoch, np.arange(order.length))


def naive_order(sizes, lanes, run, window, seed, epoch):
    """The definition, step by step with lists: the reference for ``ShardOrder.at``."""
    from phalanx.data._permutation import KeyedPermutation, derive_key, random_words

    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    filled = [shard for shard, size in enumerate(sizes) if size]
    permutation = KeyedPermutation(len(filled), derive_key("shards", seed, epoch))
    row = [(shard, starts[shard] + i) for k in permutation(np.arange(len(filled))) for shard in [filled[k]]
           for i in range(sizes[shard])]  # fmt: skip
    phases = [int(word) % window + 1 for word in random_words(derive_key("phases", seed, epoch), lanes)]
    mixed_lanes = []
    for lane in range(lanes):
        first, stop = lane * len(row) // lanes, (lane + 1) * len(row) // lanes
        mixed, place, room = [], first, phases[lane]
        while place < stop:
            end, shards = place, []
            while end < stop and (row[end][0] in shards or len(shards) < room):
                if row[end][0] not in shards:
                    shards.append(row[end][0])
                end += 1
            inside = KeyedPermutation(end - place, derive_key("window", seed, epoch, place))(np.arange(end - place))
            mixed += [row[place + i][1] for i in inside.tolist()]
            place, room = end, window
        mixed_lanes.append(mixed)
    turns = min(map(len, mixed_lanes)) // run
    body = [sample for turn in range(turns) for mixed in mixed_lanes for sample in mixed[turn * run : (turn + 1) * run]]
    return body + [sample for mixed in mixed_lanes for sample in mixed[turns * run :]]


@settings(max_examples=80, deadline=None)
@given(SIZES, SMALL, SMALL, st.integers(1, 4), st.integers(0, 3), st.integers(0, 2))
def test_every_position_is_that_of_the_definition(sizes, lanes, run, window, seed, epoch):
    order = ShardOrder(sizes, lanes=lanes, run=run, window=window)
    expected = naive_order(sizes, lanes, run, window, seed, epoch)
    assert all_of(order, seed, epoch).tolist() == expected
    assert sorted(expected) == list(range(sum(sizes)))
    positions = np.random.default_rng(0).integers(0, order.length, 30)
    assert order.at(seed, epoch, positions).tolist() == [expected[position] for position in positions]


def test_the_order_never_changes():
    """Positions are saved: another order under the same name would lose and repeat samples in every resumed run."""
    order = ShardOrder([7, 0, 5, 9, 4, 6], lanes=2, run=3, window=2)
    assert all_of(order, seed=5, epoch=2).tolist() == [
        7,
        11,
        9,
        27,
        30,
        28,
        10,
        8,
        14,
        26,
        29,
        1,
        12,
        16,
        20,
        23,
        21,
        5,
        18,
        17,
        25,
        6,
        24,
        2,
        15,
        19,
        13,
        0,
        4,
        22,
        3,
    ]
    large = ShardOrder(np.arange(1, 5001), lanes=6, run=8, window=8)
    positions = np.array([0, 1, 7, 8, 47, 48, 10**5, 10**6, 6 * 10**6, large.length - 1])
    assert large.at(1, 3, positions).tolist() == [
        11954344,
        11958419,
        11954458,
        4787515,
        613785,
        12226294,
        12336258,
        4331166,
        3686395,
        3184971,
    ]
    mixed = MixedOrder([ShardOrder([6, 4], lanes=2, run=1, window=1), Shuffled(5)], [2, 1])
    assert all_of(mixed, seed=3, epoch=1).tolist() == [12, 0, 5, 2, 8, 14, 1, 11, 9, 3, 13, 6, 10, 4, 7]


@settings(max_examples=20, deadline=None)
@given(SIZES, SMALL, SMALL, st.integers(1, 4))
def test_windows_name_the_shards_of_every_sample_and_no_more_than_asked_for(sizes, lanes, run, window):
    order = ShardOrder(sizes, lanes=lanes, run=run, window=window)
    table = order.table
    ahead = {}
    for position in range(order.length):
        (found,) = order.windows_at(1, 0, np.array([position]))
        (shard,), _ = table.locate(order.at(1, 0, np.array([position])))
        assert shard in found.shards
        assert len(found.shards) <= window
        assert len(found.upcoming) <= window
        ahead[found.first] = found
    for found in ahead.values():  # what is announced is what comes
        if found.stop in ahead and found.upcoming:
            assert ahead[found.stop].shards[: len(found.upcoming)] == found.upcoming


def test_a_step_holds_most_classes_of_a_sorted_dataset():
    """At least 9 of 10, with 6 lanes and windows of 8, in steps of 150; blocks of neighbours have about one."""
    labels = np.repeat(np.arange(10), 6000)

    def mean_classes(indices):
        return np.mean([len(set(step)) for step in labels[indices].reshape(-1, 150).tolist()])

    order = ShardOrder(np.full(1000, 60), lanes=6, run=25, window=8)
    assert mean_classes(all_of(order)) >= 9
    blocks = ElasticBatchSampler(range(60000), 6, 25, slots=(), shuffle="block", block_size=60 * 8).order
    assert mean_classes(all_of(blocks)) < 3


def test_a_resume_far_into_many_shards_takes_little_time_and_memory():
    """2 * 10^8 samples in 10^5 shards, at 60%: under 50 ms of this thread's own time, and under 20 MB."""
    dataset = Sized(np.full(10**5, 2000))
    state = ElasticBatchSampler(dataset, 8, 32, slots=(), shuffle="shards").state_dict()
    state = {**state, "position": int(0.6 * len(dataset)) // 256 * 256, "step": 5}

    def resume():
        sampler = ElasticBatchSampler(Sized(dataset.shards.sizes), 8, 32, slots=(), shuffle="shards")
        sampler.load_state_dict(state)
        return sampler.indices(sampler.step, 0)

    times = []
    for _ in range(5):
        begin = time.thread_time()
        first = resume()
        times.append(time.thread_time() - begin)
    assert min(times) < 0.05
    tracemalloc.start()
    assert resume() == first
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert len(json.dumps(state)) < 500_000


def test_parameters_are_saved_and_taken_over():
    dataset = ShardedDataset(Numbers([10] * 20))
    chosen = ShardOrder(dataset, lanes=3, run=5, window=2)
    sampler = ElasticBatchSampler(dataset, 4, 2, slots=range(4), order=chosen)
    for step in range(6):
        sampler.commit(step)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert {name: state["parameters"][name] for name in ("lanes", "run", "window")} == {
        "lanes": 3,
        "run": 5,
        "window": 2,
    }
    other = ElasticBatchSampler(dataset, 4, 2, slots=range(4), shuffle="shards")  # by default 4, 2 and 8
    assert other.indices(6, 0) != sampler.indices(6, 0)
    other.load_state_dict(state)
    assert other.indices(6, 0) == sampler.indices(6, 0)
    assert other.state_dict() == state
    replicas = ElasticDistributedSampler(dataset, 2, 0, order=chosen)
    state = replicas.state_dict()
    another = ElasticDistributedSampler(dataset, 3, 1, shuffle="shards")
    another.load_state_dict(state)
    assert another.state_dict() == state


def test_another_slot_batch_goes_on_in_the_same_order():
    dataset = ShardedDataset(Numbers([13, 0, 21, 8, 30]))
    sampler = ElasticBatchSampler(dataset, 3, 4, slots=range(3), shuffle="shards", tail="uneven")
    whole = [i for step in range(sampler.steps_per_epoch) for slot in range(3) for i in sampler.indices(step, slot)]
    sampler.commit(0)
    sampler.commit(1)
    wider = ElasticBatchSampler(dataset, 2, 7, slots=range(2), shuffle="shards", tail="uneven")
    wider.load_state_dict(sampler.state_dict())
    rest = [i for step in range(2, wider.end_of_epoch(2)) for slot in range(2) for i in wider.indices(step, slot)]
    assert whole[:24] + rest == whole


@pytest.mark.parametrize("kind", [ElasticBatchSampler, ElasticDistributedSampler])
def test_a_changed_shard_is_refused_by_its_name(kind):
    def make(sizes, words):
        dataset = ShardedDataset(Numbers(sizes, words))
        given = {"num_slots": 2, "slot_batch_size": 2, "slots": ()} if kind is ElasticBatchSampler else {}
        numbers = {} if given else {"num_replicas": 1, "rank": 0}
        return kind(dataset, **given, **numbers, shuffle="shards")

    state = make([*SIX, 5, 5, 5], [*SIX, 1, 2, 3]).state_dict()
    make([*SIX, 5, 5, 5], [*SIX, 1, 2, 3]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"other shards: changed since then: numbers-007\. Positions would mean"):
        make([*SIX, 5, 5, 5], [*SIX, 1, 9, 3]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"changed since then: numbers-008"):
        make([*SIX, 5, 5, 6], [*SIX, 1, 2, 3]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"it had 9 shards and there are 10 now"):
        make([*SIX, 5, 5, 5, 1], [*SIX, 1, 2, 3, 4]).load_state_dict(state)
    plain = make([*SIX, 5, 5, 5], [*SIX, 1, 2, 3])
    with pytest.raises(ValueError, match="state is of order 'shuffled"):
        plain.load_state_dict({**state, "order": "shuffled(sequential)", "parameters": {}})
    with pytest.raises(ValueError, match="expected a dict"):
        plain.load_state_dict({**state, "parameters": [1]})
    with pytest.raises(ValueError, match="window=None; expected an integer"):
        plain.load_state_dict({**state, "parameters": {**state["parameters"], "window": None}})
    with pytest.raises(ValueError, match="no readable marks"):
        plain.load_state_dict({**state, "parameters": {**state["parameters"], "digest": "", "marks": "?"}})


def test_what_shards_cannot_be_is_refused():
    with pytest.raises(TypeError, match="shuffle='shards' needs a dataset that has shards; list has none"):
        ElasticBatchSampler([1, 2], 1, 1, slots=(), shuffle="shards")
    with pytest.raises(ValueError, match="window is 0; expected at least 1"):
        ShardOrder([1], window=0)
    with pytest.raises(ValueError, match="2 shards are empty"):
        ShardTable([0, 0])
    with pytest.raises(TypeError, match="int has no shards"):
        ShardOrder(7)
    with pytest.raises(ValueError, match="lanes and run of a ShardOrder are open"):
        ShardOrder([3]).at(0, 0, np.arange(3))
    with pytest.warns(UserWarning, match="2 shards for 4 lanes"):
        ElasticBatchSampler(Sized([9, 9]), 4, 1, slots=(), shuffle="shards")


PARTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(0, 5))
def test_a_mix_has_exact_counts_and_goes_through_each_source_once_per_its_epoch(parts, seed):
    sizes, counts = zip(*parts, strict=True)
    order = MixedOrder([Shuffled(size) for size in sizes], counts)
    first = np.concatenate(([0], np.cumsum(sizes)))
    seen = np.concatenate([all_of(order, seed, epoch) for epoch in range(4)])
    label = np.searchsorted(first, seen, side="right") - 1
    for cycle in label.reshape(-1, sum(counts)):
        assert np.bincount(cycle, minlength=len(sizes)).tolist() == list(counts)
    for number, size in enumerate(sizes):
        own = seen[label == number] - first[number]
        for begin in range(0, len(own) - size + 1, size):
            assert sorted(own[begin : begin + size].tolist()) == list(range(size)), "its epochs are its own"
    if not order.may_repeat:
        assert len(set(all_of(order, seed).tolist())) == order.length


def test_a_mix_of_shards_reads_one_lane_of_each_source_per_slot_and_resumes():
    left, right = ShardedDataset(Numbers([6] * 12)), ShardedDataset(Numbers([4] * 9))
    dataset = Concatenated([left, right])
    order = MixedOrder([ShardOrder(left, window=2), ShardOrder(right, window=1)], [2, 1])
    sampler = ElasticBatchSampler(dataset, 3, 6, slots=range(3), order=order, tail="uneven")
    assert [(part.lanes, part.run, part.window) for part in sampler.order.parts] == [(3, 4, 2), (3, 2, 1)]
    shards = {slot: set() for slot in range(3)}
    for step in range(sampler.steps_per_epoch - 1):
        for slot in range(3):
            indices = sampler.indices(step, slot)
            windows = sampler.windows(step, slot)
            near = {shard for window in windows for shard in window.shards}
            read = {i // 6 if i < 72 else 12 + (i - 72) // 4 for i in indices}
            assert read <= near
            shards[slot] |= read
    assert len(shards[0]) <= 2 * -(-(12 + 9) // 3), "a slot reads its lanes, not all shards"
    sampler.commit(0)
    state = json.loads(json.dumps(sampler.state_dict()))
    again = ElasticBatchSampler(dataset, 3, 6, slots=range(3), order=order, tail="uneven")
    again.load_state_dict(state)
    assert again.indices(1, 2) == sampler.indices(1, 2)
    changed = Concatenated([left, ShardedDataset(Numbers([4] * 9, words=range(9)))])
    parts = [ShardOrder(part, window=2) for part in changed.datasets]
    other = ElasticBatchSampler(changed, 3, 6, slots=range(3), order=MixedOrder(parts, [2, 1]), tail="uneven")
    with pytest.raises(ValueError, match="changed since then: numbers-001"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="mixes 1 sources; expected 2"):
        ElasticBatchSampler(dataset, 3, 6, slots=(), order=MixedOrder([range(100)], [1], sizes=[len(dataset)]))
    assert dataset.__getitems__([75, 0, 71, 72]) == [3, 0, 71, 0]
    plain = ElasticBatchSampler(
        ConcatDataset([[1], [2, 3]]), 1, 1, slots=(), order=MixedOrder([range(1), range(2)], [1, 1])
    )
    assert sorted(plain.indices(0, 0) + plain.indices(1, 0))[0] == 0


def test_wrong_mixes_are_refused():
    with pytest.raises(ValueError, match="2 parts, 1 counts"):
        MixedOrder([range(2), range(3)], [1])
    with pytest.raises(ValueError, match=r"counts\[1\] is 0"):
        MixedOrder([range(2), range(3)], [1, 0])
    with pytest.raises(ValueError, match="gives indices up to 2 of a dataset of size 2"):
        MixedOrder([range(3)], [1], sizes=[2])
    with pytest.raises(ValueError, match="num_cycles is 0"):
        MixedOrder([range(3)], [1], num_cycles=0)
