"""Attention in parts equals attention at once: merging, the fused kernel, and the backward of a part."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from phalanx.fsdp.context._partial_attention import (
    PartialAttention,
    attend,
    attend_backward,
    merge,
    naive_attend,
    naive_attend_backward,
)

pytestmark = pytest.mark.fast


def qkv(
    rows: int, columns: int, *, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64, width: int = 6
) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(rows * 100 + columns)
    shapes = [(2, heads, rows, 6), (2, key_heads, columns, 6), (2, key_heads, columns, width)]
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def joined(parts: list[PartialAttention]) -> PartialAttention:
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    return whole


@given(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_parts_in_any_order_and_of_any_size_make_the_whole(rows: int, cuts: list[int], order: object) -> None:
    query, key, value = qkv(rows, 9)
    bounds = [0, *sorted(cuts), 9]
    parts = [
        naive_attend(query, key[:, :, a:b], value[:, :, a:b], causal=False, scale=0.4) for a, b in pairwise(bounds)
    ]
    order.shuffle(parts)  # type: ignore[attr-defined]  # a random.Random
    whole = naive_attend(query, key, value, causal=False, scale=0.4)
    torch.testing.assert_close(joined(parts), whole)


def test_parts_that_saw_nothing_count_for_nothing() -> None:
    empty = PartialAttention(torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf))
    some = PartialAttention(torch.ones(1, 1, 2, 3), torch.full((1, 1, 2), 300.0))
    for merged in (merge(empty, some), merge(some, empty)):
        assert torch.equal(merged.out, some.out)
        assert torch.equal(merged.lse, some.lse)
    nothing = merge(empty, empty)
    assert torch.equal(nothing.out, empty.out)
    assert torch.isneginf(nothing.lse).all()


def test_scores_far_apart_do_not_overflow() -> None:
    low, high = (
        PartialAttention(torch.full((1, 1, 1, 1), v), torch.full((1, 1, 1), s)) for v, s in ((1.0, -1e4), (2.0, 1e4))
    )
    assert merge(low, high).out.item() == 2.0


@pytest.mark.parametrize("causal", [False, True])
def test_the_naive_form_is_torchs_attention(causal: bool) -> None:
    query, key, value = (t.requires_grad_() for t in qkv(7, 7))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=0.3, enable_gqa=True)
    whole = naive_attend(query, key, value, causal=causal, scale=0.3)
    torch.testing.assert_close(whole.out, expected)
    grad = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view(expected.shape)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    with torch.no_grad():
        found = naive_attend_backward(grad, query, key, value, whole, causal=causal, scale=0.3)
    torch.testing.assert_close(found, expected_grads)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_kernel_is_the_naive_form(dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    rows = 8 if causal else 5
    query, key, value = qkv(rows, 8, dtype=dtype)
    fused, naive = (form(query, key, value, causal=causal, scale=0.4) for form in (attend, naive_attend))
    torch.testing.assert_close(fused.out, naive.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(fused.lse, naive.lse, atol=tolerance, rtol=tolerance)
    grad = torch.ones_like(query)
    backward = [
        form(grad, query, key, value, naive, causal=causal, scale=0.4)
        for form in (attend_backward, naive_attend_backward)
    ]
    torch.testing.assert_close(backward[0], backward[1], atol=tolerance, rtol=tolerance)


def test_values_of_another_width_are_computed_too() -> None:
    query, key, value = qkv(5, 5, width=3)
    part = attend(query, key, value, causal=True, scale=0.4)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(part.out, expected)


@given(st.integers(1, 8))
def test_gradients_of_parts_add_up(cut: int) -> None:
    query, key, value = qkv(4, 9)
    whole, grad = attend(query, key, value, causal=False, scale=0.4), torch.ones(2, 4, 4, 6, dtype=torch.float64)
    expected = attend_backward(grad, query, key, value, whole, causal=False, scale=0.4)
    left, right = (
        attend_backward(grad, query, key[:, :, piece], value[:, :, piece], whole, causal=False, scale=0.4)
        for piece in (slice(0, cut), slice(cut, 9))
    )
    torch.testing.assert_close(left[0] + right[0], expected[0])
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([left[index], right[index]], 2), expected[index])
