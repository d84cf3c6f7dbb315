"""The norm by blocks: one value at any cut, offset, number of threads and holders; that of torch but for rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.elastic.reduce._norm_blocks import (
    BLOCK,
    block_sums,
    clip,
    clip_coefficient,
    naive_block_sums,
    norm_of,
    num_blocks,
    tree_sum,
)
from phalanx.elastic.sharded._cell_table import SectionShape, cell_table
from phalanx.fsdp.layout._unit_layout import flat_starts

pytestmark = pytest.mark.fast


def gradients(sizes: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=generator) * 10 ** (size % 7 - 3)).to(dtype) for size in sizes]


def elsewhere(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values at another place in memory."""
    return torch.cat([values.new_zeros(offset), values])[offset:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_those_of_the_reference(dtype: torch.dtype) -> None:
    grads = gradients([1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17, 0], dtype)
    sums = block_sums(grads)
    assert sums.tolist() == naive_block_sums(grads)
    assert len(sums) == sum(num_blocks(grad.numel()) for grad in grads)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 20 * BLOCK)), min_size=1, max_size=6),
    whole=st.booleans(),
    num_holders=st.integers(1, 8),
    offset=st.integers(0, 70),
    seed=st.integers(0, 99),
)
def test_any_holders_of_cells_find_the_same_bits(
    sizes: list[int], whole: bool, num_holders: int, offset: int, seed: int
) -> None:
    """Each holder sums the pieces of parameters in its cells; put in order, they are the sums of the parameters."""
    grads = gradients(sizes, seed=seed)
    expected = block_sums(grads)
    table = cell_table([[SectionShape(tuple(sizes))]], whole_matrices=whole)
    starts = flat_starts(sizes)
    first_block = [sum(map(num_blocks, sizes[:i])) for i in range(len(sizes))]
    found = torch.full_like(expected, -1.0)
    for holder in range(num_holders):
        pieces: list[torch.Tensor] = []
        places: list[int] = []
        for number, cell in enumerate(table.cells):
            if number * num_holders // len(table) != holder:
                continue
            for i, (start, grad) in enumerate(zip(starts, grads, strict=False)):
                begin, end = max(cell.begin, start) - start, min(cell.end, start + grad.numel()) - start
                if begin < end:
                    assert begin % BLOCK == 0
                    pieces.append(elsewhere(grad[begin:end], offset + len(pieces)))
                    at = first_block[i] + begin // BLOCK
                    places += range(at, at + num_blocks(end - begin))
        found[places] = block_sums(pieces)
    assert torch.equal(found, expected)
    assert norm_of(found) == norm_of(expected)


def test_rows_are_summed_alike_at_any_place_in_any_number_and_with_any_threads() -> None:
    """What torch's kernel does not promise."""
    grads = gradients([256 * BLOCK - 5, 3 * BLOCK, 512 * BLOCK + 77])
    expected = torch.tensor(naive_block_sums(grads), dtype=torch.float64)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(block_sums(grads), expected)
            for offset in (1, 3, 8, 13):
                assert torch.equal(block_sums([elsewhere(grad, offset) for grad in grads]), expected)
            for count in (1, 2, 3, 7, 100, 500):
                assert torch.equal(block_sums([grads[2][: count * BLOCK]]), expected[259 : 259 + count])
    finally:
        torch.set_num_threads(before)
    assert tree_sum(expected) == pytest.approx(math.fsum(expected.tolist()), rel=1e-14)
    exact = math.fsum(value * value for grad in grads for value in grad.tolist())
    assert norm_of(expected) == pytest.approx(math.sqrt(exact), rel=1e-7)


@pytest.mark.parametrize("max_norm", [0.3, 1e9, 0.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_clipping_is_torchs_but_for_rounding(dtype: torch.dtype, max_norm: float) -> None:
    grads = gradients([7, 3000, 64], dtype)
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in [*grads, torch.zeros(5)]]
    for param, grad in zip(params, grads, strict=False):
        param.grad = grad.clone()
    mine = [None if param.grad is None else param.grad.clone() for param in params]
    norm = clip(mine, [param.numel() for param in params], max_norm)
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for ours, param in zip(mine, params, strict=True):
        assert (ours is None) == (param.grad is None)
        if ours is not None:
            torch.testing.assert_close(ours, param.grad, rtol=1e-6, atol=0.0)


def test_views_in_another_order_and_no_gradients_at_all() -> None:
    values = gradients([6000])[0].view(60, 100)
    turned = values.t().contiguous().t()
    assert not turned.is_contiguous()
    assert torch.equal(block_sums([turned]), block_sums([values]))
    assert clip([None, None], [3, 4], 1.0) == 0.0
    assert clip([], [], 1.0) == 0.0
    assert norm_of(block_sums([])) == 0.0


@pytest.mark.parametrize(("value", "norm"), [(math.nan, "nan"), (math.inf, "inf"), (3e38, "inf"), (1e18, "4e+18")])
def test_what_is_not_finite_is_told(value: float, norm: str) -> None:
    assert f"{clip([torch.full((16,), value)], [16], 1.0):.0e}" == norm


def test_a_factor_of_one_changes_no_bit() -> None:
    assert clip_coefficient(0.0, 1.0) == clip_coefficient(1.0 - 1e-5, 1.0) == 1.0
    assert math.isnan(clip_coefficient(math.nan, 1.0))
