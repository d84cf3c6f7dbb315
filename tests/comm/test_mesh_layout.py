"""Index maths of the mesh against plain reshapes of numpy, up to 100,000 ranks."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.mesh._mesh_layout import Axis, MeshLayout, is_in_root_order, merge_modes, split_modes

pytestmark = pytest.mark.fast

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shapes, st.data())
def test_coordinates_are_those_of_a_reshaped_range(shape: list[int], data: st.DataObject) -> None:
    layout = MeshLayout.of_shape(shape)
    grid = np.arange(math.prod(shape)).reshape(shape)
    position = data.draw(st.integers(0, grid.size - 1))
    assert layout.shape == tuple(shape)
    assert grid[layout.coordinate(position)] == position
    assert np.array_equal(layout.offsets(), grid)


@given(shapes, st.data())
def test_slices_are_those_of_numpy(shape: list[int], data: st.DataObject) -> None:
    grid = np.arange(math.prod(shape)).reshape(shape)
    kept = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    position = data.draw(st.integers(0, grid.size - 1))
    coordinate = np.unravel_index(position, shape)
    expected = grid[tuple(slice(None) if i in kept else coordinate[i] for i in range(len(shape)))]
    layout = MeshLayout.of_shape(shape).select(kept)
    assert np.array_equal(layout.members(position), expected)
    flat = layout.flatten()
    assert np.array_equal(flat.members(position), expected.reshape(-1))
    assert expected.reshape(-1)[flat.coordinate(position)[0]] == position


@given(shapes, st.data())
def test_copies_cover_every_position_once(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    kept = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    layout = MeshLayout.of_shape(shape).select(kept)
    copies = layout.copies(size)
    assert sorted(copies.reshape(-1).tolist()) == list(range(size))
    for row in copies:
        assert np.array_equal(layout.members(int(row[-1])).reshape(-1), row)


@given(shapes, shapes)
def test_unflatten_undoes_flatten(left: list[int], right: list[int]) -> None:
    layout = MeshLayout.of_shape([*left, *right])
    for kept in (range(len(left)), range(len(left), len(left) + len(right))):
        part = layout.select(list(kept))
        again = part.flatten().unflatten(0, part.shape)
        assert again.shape == part.shape
        assert np.array_equal(again.offsets(), part.offsets())


def test_flattening_axes_apart_keeps_both_strides() -> None:
    flat = MeshLayout.of_shape((2, 3, 4)).select((0, 2)).flatten()
    assert flat.strides == ((12, 1),)
    assert flat.members(5).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert flat.unflatten(0, (4, 2)).strides == ((12, 2), 1)


def test_modes_merge_and_split() -> None:
    assert merge_modes([(2, 12), (3, 4), (4, 1)]) == ((24, 1),)
    assert merge_modes([(1, 7)]) == ()
    assert [axis.modes for axis in split_modes(Axis(((12, 1),)), (3, 1, 4))] == [
        ((3, 4),),
        (),
        ((4, 1),),
    ]
    with pytest.raises(ValueError, match="product"):
        split_modes(Axis(((4, 1),)), (2, 3))
    with pytest.raises(ValueError, match="straddle"):
        split_modes(Axis(((2, 24), (3, 1))), (3, 2))


def test_order_is_checked() -> None:
    layout = MeshLayout.of_shape((2, 3, 4))
    for size in (1, 2, 3):
        for order in itertools.permutations(range(3), size):
            assert is_in_root_order(layout.select(order)) == (list(order) == sorted(order))
    overlap = MeshLayout((layout.select((0, 1)).flatten().axes[0], layout.axes[1]))
    assert not is_in_root_order(overlap)


def test_a_hundred_thousand_ranks_take_under_a_second() -> None:
    shape = (10, 100, 100)
    started = time.process_time()
    layout = MeshLayout.of_shape(shape)
    total = math.prod(shape)
    for axis in range(3):
        assert layout.select((axis,)).copies(total).size == total
    for position in range(0, total, 10):
        assert layout.select((0, 2)).base(position) == position // 100 % 100 * 100
    assert time.process_time() - started < 1.0
