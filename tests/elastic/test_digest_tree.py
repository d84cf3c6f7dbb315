"""Digests of tensors by blocks: one root for any holders of ranges, another for any other bits, shape or dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.elastic.checkpoint._digest_tree import TensorDigest, range_nodes, root_of
from phalanx.elastic.checkpoint._state import digest
from phalanx.elastic.reduce._norm_blocks import BLOCK, num_blocks

pytestmark = pytest.mark.fast


@settings(max_examples=40)
@given(
    size=st.integers(1, 40 * BLOCK),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_any_ranges_give_the_root_of_the_tensor(size: int, cuts: list[int], dtype: torch.dtype) -> None:
    tensor = torch.arange(size).to(dtype)
    places = sorted({0, size, *(min(size, cut * BLOCK) for cut in cuts)})
    nodes = {}
    for begin, end in itertools.pairwise(places):
        found = range_nodes(tensor[begin:end].clone(), begin, size)
        assert len(found) <= 2 * num_blocks(size).bit_length() + 1, "a few for each range"
        nodes |= found
    assert root_of(size, nodes) == TensorDigest.of(tensor).root


def test_a_state_with_stand_ins_has_the_digest_of_the_state() -> None:
    weights = torch.randn(3, 1000)
    state = {"model": {"w": weights, "n": torch.tensor(3)}, "step": 4, "empty": torch.zeros(0, 5)}
    stand_in = TensorDigest(weights.dtype, (3, 1000), TensorDigest.of(weights.view(-1)).root)
    assert digest({**state, "model": {"w": stand_in, "n": torch.tensor(3)}}) == digest(state)


def test_every_bit_shape_and_dtype_counts() -> None:
    weights = torch.zeros(4 * BLOCK + 3)
    known = {digest(weights)}
    for place in (0, BLOCK - 1, BLOCK, 4 * BLOCK + 2):
        other = weights.clone()
        other[place] = -0.0
        known.add(digest(other))
    known |= {digest(weights.view(1, -1)), digest(weights.int()), digest(weights[:-1]), digest(weights[:0])}
    assert len(known) == 9
    assert digest(weights.view(1, -1).t().contiguous().t()) in known


def test_ranges_that_cut_blocks_or_lack_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a range of blocks"):
        range_nodes(torch.zeros(100), 0, 5000)
    with pytest.raises(ValueError, match="expected a range of blocks"):
        range_nodes(torch.zeros(BLOCK), 5, 5000)
    with pytest.raises(ValueError, match="is in no piece"):
        root_of(5000, range_nodes(torch.zeros(BLOCK), 0, 5000))
