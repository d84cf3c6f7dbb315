"""The slot tree: the same additions for every way to spread slots over workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic.reduce._slots import cover, fold, siblings, slot_range

pytestmark = pytest.mark.fast


@given(num_slots=st.integers(1, 70), size=st.integers(1, 80))
def test_slot_ranges_are_contiguous_and_balanced(num_slots, size):
    ranges = [slot_range(num_slots, size, rank) for rank in range(size)]
    assert [slot for r in ranges for slot in r] == list(range(num_slots))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(num_slots=st.integers(1, 70), data=st.data())
def test_any_partition_folds_to_the_same_expression(num_slots, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, num_slots), max_size=8)) | {num_slots})
    leaves = {(slot, slot + 1): str(slot) for slot in range(num_slots)}

    def add(left, right):
        return f"({left}+{right})"

    pieces, start = {}, 0
    for end in cuts:
        for node in cover(num_slots, range(start, end)):
            pieces[node] = fold_below(node, leaves, add)
        start = end
    assert fold(num_slots, pieces, add) == fold(num_slots, leaves, add)


def fold_below(node, leaves, add):
    from phalanx.elastic.reduce._slots import children

    if node in leaves:
        return leaves[node]
    left, right = children(node)
    return add(fold_below(left, leaves, add), fold_below(right, leaves, add))


@given(num_slots=st.integers(1, 70), data=st.data())
def test_a_binary_counter_ends_with_the_cover(num_slots, data):
    start = data.draw(st.integers(0, num_slots - 1))
    end = data.draw(st.integers(start, num_slots))
    stack, deepest = [], 0
    left_of = siblings(num_slots)
    for slot in range(start, end):
        stack.append((slot, slot + 1))
        deepest = max(deepest, len(stack))
        while len(stack) > 1 and left_of.get(stack[-1]) == stack[-2]:
            right = stack.pop()
            stack[-1] = (stack[-1][0], right[1])
    assert stack == cover(num_slots, range(start, end))
    assert deepest <= 2 * max(1, num_slots.bit_length())
    if start == 0:
        assert deepest <= num_slots.bit_length() + 1


def test_a_left_sum_would_differ_in_bits():
    """The reason for the tree: without it the number of workers shows in the last bits."""
    values = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)).unbind()
    tree = fold(8, {(i, i + 1): v for i, v in enumerate(values)}, torch.add)
    left = sum(values[1:], values[0])
    assert torch.allclose(tree, left, atol=1e-5)
    assert not torch.equal(tree, left)


def test_a_missing_slot_is_named():
    with pytest.raises(ValueError, match="slot 2 of 4 is in no piece"):
        fold(4, {(0, 2): 1, (3, 4): 1}, int.__add__)


def test_bad_ranks_are_refused():
    with pytest.raises(ValueError, match=r"rank 3 is outside \[0, 3\)"):
        slot_range(8, 3, 3)
    with pytest.raises(ValueError, match="num_slots is 0"):
        slot_range(0, 1, 0)
