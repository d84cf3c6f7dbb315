"""Orders: blocks, subsets, users' samplers, weights, concatenations; alone and inside the samplers."""

from __future__ import annotations

import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from phalanx.data import (
    BlockShuffled,
    ConcatOrder,
    ElasticDistributedSampler,
    IndexOrder,
    SamplerOrder,
    Sequential,
    Shuffled,
    WeightedOrder,
)
from phalanx.data._wrapped_orders import as_order, uniform_at

pytestmark = pytest.mark.fast


def whole(order, seed=0, epoch=0):
    return order.at(seed, epoch, np.arange(order.length)).tolist()


def resumed_twice(order, length):
    """An epoch over 3 replicas, then 2, then 1, through saved states."""
    used, state = [], None
    for count, rounds in ((3, 2), (2, 3), (1, None)):
        samplers = [
            ElasticDistributedSampler(range(length), count, rank, order=order, tail="uneven") for rank in range(count)
        ]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        iterators = [iter(sampler) for sampler in samplers]
        if rounds is None:
            used += list(iterators[0])
        else:
            used += [next(iterator) for _ in range(rounds) for iterator in iterators]
            state = json.loads(json.dumps(samplers[0].state_dict()))
    return used


ORDERS = {
    "sequential": Sequential(20),
    "shuffled": Shuffled(20),
    "block": BlockShuffled(20, 6),
    "subset": IndexOrder([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]),
    "range": IndexOrder(range(19, 0, -1)),
    "shuffled subset": Shuffled(IndexOrder(range(0, 40, 2))),
    "tensor": as_order(torch.arange(15)),
    "random sampler": SamplerOrder(RandomSampler(range(20))),
    "weighted sampler": as_order(WeightedRandomSampler([0.1] * 10 + [0.9] * 10, 20)),
    "subset sampler": as_order(SubsetRandomSampler(list(range(5, 20)))),
    "with replacement": WeightedOrder(np.arange(20.0), 25),
    "without replacement": WeightedOrder(np.arange(20.0), 15, replacement=False),
    "concat": Shuffled(ConcatOrder([Shuffled(8), BlockShuffled(12, 5)])),
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_survives_resizes_and_restores(name):
    order = ORDERS[name]
    assert resumed_twice(order, 40) == whole(order)


@pytest.mark.parametrize("name", ORDERS)
def test_positions_are_independent_of_each_other(name):
    order = ORDERS[name]
    expected = whole(order, 5, 2)
    assert [int(order.at(5, 2, np.array([p]))[0]) for p in reversed(range(order.length))] == expected[::-1]
    assert order.at(5, 2, np.array([], dtype=np.int64)).tolist() == []


def test_names_tell_orders_apart():
    names = [order.name for order in ORDERS.values()]
    assert len(set(names)) == len(names)
    assert IndexOrder([1, 2]).name != IndexOrder([2, 1]).name
    assert WeightedOrder([1, 2]).name != WeightedOrder([2, 1]).name


def test_a_state_of_another_order_is_refused():
    one = ElasticDistributedSampler(range(9), 1, 0, order=[1, 2, 3])
    other = ElasticDistributedSampler(range(9), 1, 0, order=[3, 2, 1])
    with pytest.raises(ValueError, match="positions would mean other samples"):
        other.load_state_dict(one.state_dict())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    length=st.integers(1, 200),
    block_size=st.integers(1, 50),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 9),
)
def test_block_shuffle_is_a_permutation_that_stays_in_one_block_at_a_time(length, block_size, seed, epoch):
    order = whole(BlockShuffled(length, block_size), seed, epoch)
    assert sorted(order) == list(range(length))
    blocks = [index // min(block_size, length) for index in order]
    changes = sum(one != other for one, other in itertools.pairwise(blocks))
    assert changes == len(set(blocks)) - 1


def test_block_shuffle_moves_the_short_block_and_the_insides():
    order = BlockShuffled(10, 4)
    places = {whole(order, seed).index(8) // 4 for seed in range(30)}
    assert len(places) == 3
    insides = {tuple(index % 4 for index in whole(order, seed) if index < 4) for seed in range(200)}
    assert len(insides) == 24
    pairs = [
        [[index % 4 for index in whole(order, seed) if index // 4 == block] for block in (0, 1)] for seed in range(20)
    ]
    assert sum(one != other for one, other in pairs) > 10, "each block has a shuffle of its own"


def test_shuffling_twice_is_shuffling_once():
    assert whole(Shuffled(Shuffled(30))) == whole(Shuffled(30))


def test_a_range_of_a_trillion_takes_no_memory():
    order = Shuffled(IndexOrder(range(5, 10**12, 3)))
    indices = order.at(0, 0, np.arange(100))
    assert ((indices - 5) % 3 == 0).all()
    assert indices.max() < 10**12


def test_indices_are_copied():
    given_ = np.array([1, 2, 3])
    order = IndexOrder(given_)
    given_[:] = 0
    assert whole(order) == [1, 2, 3]


def test_a_users_sampler_is_drawn_from_seed_and_epoch_and_leaves_no_trace():
    class Mixed:
        """Draws from all global sources of randomness."""

        def __len__(self):
            return 3

        def __iter__(self):
            return iter([random.randrange(1000), np.random.randint(1000), int(torch.randint(1000, ()))])

    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    order = as_order(Mixed())
    first, again, next_epoch = whole(order, 0, 0), whole(as_order(Mixed()), 0, 0), whole(order, 0, 1)
    assert first == again
    assert all(one != other for one, other in zip(first, next_epoch, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


def test_a_sampler_with_its_own_generator_agrees_between_ranks():
    def order_on_a_rank(own_seed):
        generator = torch.Generator().manual_seed(own_seed)
        sampler = RandomSampler(range(50), generator=generator)
        before = generator.get_state()
        drawn = whole(as_order(sampler), 3, 4)
        assert torch.equal(generator.get_state(), before)
        return drawn

    assert order_on_a_rank(1) == order_on_a_rank(2)


def test_a_sampler_with_epochs_is_told_the_epoch():
    inner = torch.utils.data.DistributedSampler(range(30), num_replicas=1, rank=0, seed=1)
    order = as_order(inner)
    for epoch in (0, 3):
        drawn = whole(order, 0, epoch)
        inner.set_epoch(epoch)
        assert drawn == list(inner)


def test_a_sampler_of_changing_length_is_refused():
    class Liar:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([1, 2])

    with pytest.raises(ValueError, match="Liar gave 2 indices in epoch 0, but its length is 3"):
        whole(as_order(Liar()))


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_are_the_probabilities_of_the_first_draw(replacement):
    weights = np.array([0.0, 1.0, 2.0, 5.0, 0.0, 12.0])
    order = WeightedOrder(weights, 1, replacement)
    draws = [whole(order, 0, epoch)[0] for epoch in range(2000)]
    observed = np.bincount(draws, minlength=6)
    expected = weights / weights.sum() * len(draws)
    kept = weights > 0
    assert observed[~kept].sum() == 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    assert statistic < 3 + 4.5 * math.sqrt(6)


def test_without_replacement_the_second_draw_is_from_what_is_left():
    order = WeightedOrder([1.0, 2.0, 3.0], 2, replacement=False)
    pairs = [tuple(whole(order, 1, epoch)) for epoch in range(3000)]
    for first, second in ((0, 1), (1, 0), (2, 0), (2, 1)):
        weights = [1.0, 2.0, 3.0]
        chance = weights[first] / 6 * weights[second] / (6 - weights[first])
        spread = math.sqrt(3000 * chance * (1 - chance))
        assert abs(pairs.count((first, second)) - 3000 * chance) < 4.5 * spread


def test_draws_with_replacement_at_different_positions_are_independent():
    uniform = uniform_at(b"k" * 64, np.arange(100_000))
    assert abs(uniform.mean() - 0.5) < 4.5 / math.sqrt(12 * uniform.size)
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 4.5 / math.sqrt(uniform.size)
    cells = np.bincount((uniform * 100).astype(int), minlength=100)
    assert abs(((cells - 1000) ** 2 / 1000).sum() - 99) < 4.5 * math.sqrt(2 * 99)


def test_concatenated_datasets_through_a_sampler():
    parts = [TensorDataset(torch.arange(5)), TensorDataset(torch.arange(100, 107))]
    data = ConcatDataset(parts)
    mixed = ElasticDistributedSampler(data, 1, 0)
    assert sorted(int(data[i][0]) for i in mixed) == [*range(5), *range(100, 107)]
    one_after_the_other = ElasticDistributedSampler(data, 1, 0, order=ConcatOrder([Shuffled(5), Shuffled(7)]))
    values = [int(data[i][0]) for i in one_after_the_other]
    assert sorted(values[:5]) == list(range(5))
    assert sorted(values[5:]) == list(range(100, 107))


def test_parts_of_equal_length_are_shuffled_differently():
    drawn = whole(ConcatOrder([Shuffled(50), Shuffled(50)]))
    assert drawn[:50] != [index - 50 for index in drawn[50:]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: IndexOrder([]), ValueError, "empty"),
        (lambda: IndexOrder([-1]), ValueError, "contain -1"),
        (lambda: IndexOrder(range(3, -3, -1)), ValueError, "contain -2"),
        (lambda: IndexOrder([0.5]), TypeError, "float64"),
        (lambda: IndexOrder(np.zeros((2, 2), int)), TypeError, r"shape \(2, 2\)"),
        (lambda: as_order(iter([1])), TypeError, "list_iterator"),
        (lambda: as_order(3), TypeError, "order is a int"),
        (lambda: as_order({"a": 1}.__iter__()), TypeError, "expected an Order"),
        (lambda: SamplerOrder(x for x in [1]), TypeError, "no length"),
        (lambda: WeightedOrder([0.0, 0.0]), ValueError, "all 2 weights are 0"),
        (lambda: WeightedOrder([1.0, -1.0]), ValueError, "not negative"),
        (lambda: WeightedOrder([1.0, float("nan")]), ValueError, "finite"),
        (lambda: WeightedOrder([1.0, 0.0], 2, replacement=False), ValueError, "only 1 weights"),
        (lambda: WeightedOrder([1.0], 0), ValueError, "empty"),
        (lambda: ConcatOrder([Sequential(2)], sizes=[2, 3]), ValueError, "1 parts but 2 sizes"),
        (lambda: ConcatOrder([Sequential(3)], sizes=[2]), ValueError, "part 0 .* size 2"),
        (lambda: ConcatOrder([RandomSampler(range(3))]), ValueError, "pass sizes"),
        (lambda: ConcatOrder([]), ValueError, "empty"),
        (lambda: BlockShuffled(5, 0), ValueError, "block_size is 0"),
        (lambda: Sequential(0), ValueError, "empty"),
    ],
)
def test_mistakes_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
