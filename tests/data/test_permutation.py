"""The keyed permutation: a bijection for every length, random by every test we know, and never changing."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data._permutation import (
    _ROUNDS,
    MAX_LENGTH,
    TABLE_LIMIT,
    FeistelNetwork,
    KeyedPermutation,
    derive_key,
)

pytestmark = pytest.mark.fast

AWKWARD = sorted(
    {1, 2, 3, 4, 5, 7, 11, 97, 4093, 4099, 10_007, 65_521, 65_537, 99_991}
    | {2**k + d for k in range(2, 17) for d in (-1, 0, 1)}
    | {TABLE_LIMIT - 1, TABLE_LIMIT, TABLE_LIMIT + 1}
)


def whole(length: int, *key: int | str) -> np.ndarray:
    return KeyedPermutation(length, derive_key(*key))(np.arange(length))


def chi_square_z(observed: np.ndarray, expected: float) -> float:
    """How many standard deviations the chi-square statistic lies off (Wilson and Hilferty's normal form)."""
    free = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def plain_feistel(position: int, network: FeistelNetwork) -> int:
    """The same network in plain integers, one position at a time."""
    narrow = network.word is np.uint32
    bits, half = (32, 16) if narrow else (64, 32)
    first = 0x9E3779B1 if narrow else 0x9E3779B97F4A7C15
    second = 0xBB67AE85 if narrow else 0xBB67AE8584CAA73B
    sizes = [network.left_size, network.right_size]
    while True:
        halves = list(divmod(position, sizes[1]))
        for number in range(_ROUNDS):
            target, source = number % 2, 1 - number % 2
            mixed = (halves[source] + int(network._keys[number])) * first % 2**bits
            mixed = (mixed ^ (mixed >> (half - 1))) * second % 2**bits
            halves[target] = (halves[target] + ((mixed >> half) * sizes[target] >> half)) % sizes[target]
        position = halves[0] * sizes[1] + halves[1]
        if position < network.length:
            return position


@pytest.mark.parametrize("length", AWKWARD)
def test_every_index_once(length):
    assert np.array_equal(np.sort(whole(length, "once")), np.arange(length))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 10, 31, 32, 33, 101, 1023, 1025])
def test_the_network_alone_is_a_bijection_also_where_the_table_stands_in(length):
    network = FeistelNetwork(length, derive_key("network"))
    assert sorted(network.walk(np.arange(length)).tolist()) == list(range(length))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(1, MAX_LENGTH), st.integers(), st.data())
def test_vectorised_network_is_the_plain_one(length, seed, data):
    network = FeistelNetwork(length, derive_key(seed))
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8))
    fast = network.walk(np.array(positions, dtype=np.int64)).tolist()
    assert fast == [plain_feistel(position, network) for position in positions]


@pytest.mark.parametrize("length", [2**32 - 1, 2**32, 2**32 + 1, 10**12, MAX_LENGTH])
def test_distinct_and_in_range_for_huge_lengths(length):
    rng = np.random.default_rng(0)
    positions = np.unique(np.concatenate([rng.integers(0, length, 50_000), [0, 1, length - 2, length - 1]]))
    indices = KeyedPermutation(length, derive_key("huge"))(positions)
    assert np.unique(indices).size == positions.size
    assert indices.min() >= 0
    assert indices.max() < length


@pytest.mark.parametrize("length", [1, 10, TABLE_LIMIT, TABLE_LIMIT + 1, 10**6, 10**12])
def test_a_position_does_not_depend_on_what_is_asked_with_it(length):
    permutation = KeyedPermutation(length, derive_key("seek"))
    positions = np.random.default_rng(1).integers(0, length, 500)
    together = permutation(positions)
    assert [int(permutation(positions[i : i + 1])[0]) for i in range(0, 500, 50)] == together[::50].tolist()


def test_orders_never_change_between_versions():
    """Saved positions refer to these very orders. If this fails, bump the version of the state."""
    assert whole(8, "shuffled", 0, 0).tolist() == FROZEN_TABLE
    big = KeyedPermutation(10**6, derive_key("shuffled", 0, 0))
    assert big(np.arange(5)).tolist() == FROZEN_NARROW
    huge = KeyedPermutation(10**12, derive_key("shuffled", 0, 0))
    assert huge(np.arange(5)).tolist() == FROZEN_WIDE


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_small_lengths_reach_all_permutations_equally_often(length):
    trials = 100 * math.factorial(length)
    seen = Counter(tuple(whole(length, "small", trial).tolist()) for trial in range(trials))
    observed = np.array([seen[order] for order in itertools.permutations(range(length))])
    assert abs(chi_square_z(observed, 100)) < 4


@pytest.mark.parametrize("length", [7, 64, 1000, TABLE_LIMIT, TABLE_LIMIT + 1, 5003, 20_000, 65_537, 10**9, 10**12])
def test_position_chi_square(length):
    """Over many keys, an index is equally likely to stand anywhere: cells of position by index."""
    cells, keys = min(length, 16), 400
    table = np.zeros((cells, cells))
    rng = np.random.default_rng(2)
    for key in range(keys):
        positions = np.arange(length) if length <= 64 else rng.integers(0, length, 64)
        indices = KeyedPermutation(length, derive_key("cells", key))(positions)
        np.add.at(table, (positions * cells // length, indices * cells // length), 1)
    if length % cells == 0 or length > 5000:
        by_row = table.sum(axis=1, keepdims=True) / cells
        statistic = ((table - by_row) ** 2 / by_row).sum()
        free = cells * (cells - 1)
        assert abs(statistic - free) / math.sqrt(2 * free) < 4.5
    else:  # cells of different sizes: compare with the exact expectation
        counts = np.bincount(np.arange(length) * cells // length, minlength=cells) / length
        expected = table.sum(axis=1, keepdims=True) * counts
        free = cells * (cells - 1)
        statistic = ((table - expected) ** 2 / expected).sum()
        assert abs(statistic - free) / math.sqrt(2 * free) < 4.5


@pytest.mark.parametrize("length", [1000, TABLE_LIMIT + 1, 10_007, 65_536, 99_991])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_uncorrelated(length, lag):
    order = whole(length, "neighbours", lag).astype(np.float64)
    correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
    assert abs(correlation) < 4.5 / math.sqrt(length)


@pytest.mark.parametrize("length", [TABLE_LIMIT + 1, 10_007, 65_536, 99_991])
def test_differences_of_neighbours_are_spread_evenly(length):
    """A weak network shows in the differences of neighbours long before it shows in a correlation."""
    order = whole(length, "differences")
    cells = 64
    observed = np.bincount((np.diff(order) % length) * cells // length, minlength=cells)
    # Difference 0 cannot be, so cell 0 has one value less.
    sizes = np.bincount(np.arange(1, length) * cells // length, minlength=cells)
    expected = observed.sum() * sizes / sizes.sum()
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert abs(statistic - (cells - 1)) / math.sqrt(2 * (cells - 1)) < 4.5


@pytest.mark.parametrize("length", [TABLE_LIMIT + 1, 10_007, 16_384])
def test_fixed_points_and_cycles_are_those_of_a_random_permutation(length):
    """Expected: 1 fixed point on average, and about ln(n) + 0.577 cycles."""
    keys, fixed, cycles = 30, 0, 0
    for key in range(keys):
        order = whole(length, "cycles", key)
        fixed += int((order == np.arange(length)).sum())
        left, order_list = bytearray(length), order.tolist()
        for start in range(length):
            if not left[start]:
                cycles += 1
                while not left[start]:
                    left[start], start = 1, order_list[start]
    assert abs(fixed - keys) < 4.5 * math.sqrt(keys)
    expected = keys * (math.log(length) + 0.5772)
    assert abs(cycles - expected) < 4.5 * math.sqrt(expected)


def test_orders_of_different_epochs_and_seeds_are_unrelated():
    length = 10_007
    orders = [whole(length, "shuffled", seed, epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / math.sqrt(length)


def test_keys_tell_parts_apart():
    keys = [derive_key(1, 23), derive_key(12, 3), derive_key("1", 23), derive_key(1, "23"), derive_key(123)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_impossible_lengths_are_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        KeyedPermutation(length, derive_key())


FROZEN_TABLE = [2, 7, 1, 0, 4, 6, 3, 5]
FROZEN_NARROW = [28439, 69762, 482121, 533222, 810953]
FROZEN_WIDE = [906979638249, 756232659990, 802671206366, 63604610989, 373274717010]
