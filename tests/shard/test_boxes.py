"""Boxes: overlap and pieces against sets of elements."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.shard.layout._boxes import (
    Box,
    chunk_lengths,
    find_overlap,
    intersect,
    split_box,
    view_of,
)

pytestmark = pytest.mark.fast
SIZES = (5, 4)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


@st.composite
def boxes(draw):
    offsets = tuple(draw(st.integers(0, n - 1)) for n in SIZES)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(SIZES, offsets, strict=True)))


@settings(max_examples=60, deadline=None)
@given(boxes(), boxes())
def test_the_intersection_is_that_of_the_elements(a: Box, b: Box) -> None:
    common = intersect(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes(), max_size=6))
def test_overlap_is_found_exactly_when_there_is_one(several: list[Box]) -> None:
    pair = find_overlap(several)
    brute = any(elements(a) & elements(b) for i, a in enumerate(several) for b in several[:i])
    assert (pair is not None) == brute
    if pair is not None:
        assert elements(several[pair[0]]) & elements(several[pair[1]])


@settings(max_examples=40, deadline=None)
@given(boxes(), st.integers(1, 9))
def test_split_pieces_are_small_and_disjoint_and_complete(box: Box, cap: int) -> None:
    pieces = split_box(box, cap)
    assert all(piece.volume <= cap for piece in pieces)
    assert sum(piece.volume for piece in pieces) == box.volume
    assert set().union(*map(elements, pieces)) == elements(box)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length: int, num_chunks: int) -> None:
    step, lengths = chunk_lengths(length, num_chunks)
    assert sum(lengths) == length
    wanted = [len(part) for part in torch.arange(length).chunk(num_chunks)] if length else []
    assert [n for n in lengths if n] == wanted
    assert all(n == step for n in lengths[: len(wanted) - 1])


def test_a_box_without_dims_holds_one_element() -> None:
    scalar = Box((), ())
    assert scalar.volume == 1
    assert intersect(scalar, scalar) == scalar
    assert find_overlap([scalar, scalar]) == (0, 1)


def test_a_view_shares_memory() -> None:
    tensor = torch.zeros(4, 3)
    view_of(tensor, Box((12, 1), (2, 2)), (10, 0)).fill_(1)
    assert tensor.sum() == 4
    assert tensor[2:, 1:].eq(1).all()


def test_overlap_search_handles_many_shards() -> None:
    rows = [Box((i, j), (1, 1)) for i in range(30) for j in range(30)]
    assert find_overlap(rows) is None
    assert find_overlap([*rows, Box((15, 15), (1, 1))]) == (15 * 30 + 15, 900)
    assert prod((30, 30)) == len(rows)
