"""The digests by which a step is compared: what they must find, whatever the bits are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic._bit_digests import BLOCK, MessageDigests, digest_of, digests_of

pytestmark = pytest.mark.fast

SIZE = 3 * BLOCK + 17
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.complex64]


def some(dtype: torch.dtype, size: int = SIZE) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 100
    return values.to(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1, tensor.element_size())


@given(dtype=st.sampled_from(DTYPES), at=st.integers(0, SIZE - 1), data=st.data())
def test_any_change_of_one_element_is_seen_in_its_block_only(dtype, at, data):
    right = some(dtype)
    wrong = right.clone()
    width = right.element_size()
    change = data.draw(st.binary(min_size=width, max_size=width).filter(any))
    bytes_of(wrong)[at] ^= torch.tensor(list(change), dtype=torch.uint8)
    assert digest_of(wrong) != digest_of(right)
    pairs = zip(digests_of(right, BLOCK), digests_of(wrong, BLOCK), strict=True)
    assert [block for block, (a, b) in enumerate(pairs) if a != b] == [at // BLOCK]


@given(bits=st.sets(st.integers(0, 32 * SIZE - 1), min_size=2, max_size=2))
def test_any_two_bits_are_seen(bits):
    right = some(torch.float32)
    wrong = right.clone()
    for bit in bits:
        wrong.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert digest_of(wrong) != digest_of(right)


@given(bit=st.integers(0, 31), elements=st.sets(st.integers(0, SIZE - 1), min_size=2, max_size=40))
def test_one_bit_that_is_wrong_in_many_elements_is_seen(bit, elements):
    """As a broken line of a bus has it; a sum of words modulo 2^64 misses every second one of the uppermost bit."""
    right = some(torch.float32)
    wrong = right.clone()
    mask = 1 << bit if bit < 31 else -(1 << 31)
    wrong.view(torch.int32)[sorted(elements)] ^= mask
    assert digest_of(wrong) != digest_of(right)


@pytest.mark.parametrize(
    "change",
    [
        torch.Tensor.neg,
        lambda x: x.roll(1),
        lambda x: x.flip(0),
        lambda x: x * 2,
        torch.zeros_like,
        lambda x: x.view(-1).index_select(0, (torch.arange(SIZE) ^ 1).clamp(max=SIZE - 1)),
        lambda x: torch.cat([x[BLOCK : 2 * BLOCK], x[:BLOCK], x[2 * BLOCK :]]),
        lambda x: x.view(torch.int32).bitwise_and(-2).view(torch.float32),
        lambda x: x.view(torch.int32).bitwise_or(1 << 22).view(torch.float32),
    ],
    ids=["signs", "moved by one", "reversed", "doubled", "lost", "neighbours", "blocks", "stuck at 0", "stuck at 1"],
)
def test_faults_of_many_elements_are_seen(change):
    right = some(torch.float32, SIZE + 1)[:SIZE]
    assert digest_of(change(right)) != digest_of(right)


def test_layout_is_none_of_its_business_and_nothing_is_something():
    matrix = some(torch.float32, 60).view(6, 10)
    assert digest_of(matrix.t().contiguous().t()) == digest_of(matrix)
    assert digest_of(matrix) == digest_of(matrix.clone().requires_grad_())
    assert len({digest_of(None), digest_of(torch.zeros(0)), digest_of(torch.zeros(1))}) == 3


def test_a_message_has_the_digests_of_its_blocks_and_none_if_it_is_empty():
    tensor, messages = some(torch.float32), MessageDigests(3)
    messages.sent([tensor, tensor, torch.zeros(0)], rank=0)
    messages.received([tensor, torch.zeros(0), tensor[:5]], rank=0)
    assert messages.of_sent == [[], digests_of(tensor, BLOCK), []]
    assert messages.of_received == [[], [], [digest_of(tensor[:5])]]
