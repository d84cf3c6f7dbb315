"""Sums across workers: bit for bit the naive fold over single slots, in two collectives per dtype."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm import observe, simulate
from phalanx.elastic.reduce._flat_layout import FlatLayout
from phalanx.elastic.reduce._partials import Partials, Pool
from phalanx.elastic.reduce._reduction import Reduction
from phalanx.elastic.reduce._slots import fold

pytestmark = pytest.mark.fast

SHAPES = [
    ((3, 5), torch.float32),
    ((70_000,), torch.float32),
    ((7,), torch.bfloat16),
    ((2, 2), torch.float64),
]
BUFFERS = [torch.arange(5), torch.rand(3), torch.tensor(True), torch.rand(2, dtype=torch.float64)]


def gradients(num_slots):
    generator = torch.Generator().manual_seed(5)
    slots = [[torch.randn(s, generator=generator).to(d) for s, d in SHAPES] for _ in range(num_slots)]
    for slot, grads in enumerate(slots):
        if slot % 3 == 1:
            grads[0] = None  # not used by this slot
        grads[3] = None  # used by none
    return slots


def reference(num_slots):
    slots = gradients(num_slots)
    sums = []
    for i, (shape, dtype) in enumerate(SHAPES):
        leaves = {(s, s + 1): torch.zeros(shape, dtype=dtype) if g[i] is None else g[i] for s, g in enumerate(slots)}
        sums.append(fold(num_slots, leaves, torch.add))
    return sums


def reduce(group, num_slots, params, pool=None):
    pool = pool or Pool(FlatLayout.of(params, BUFFERS), 16)
    exchange = Reduction(group, num_slots, pool)
    partials = Partials(pool, num_slots)
    for slot in exchange.slots:
        buffers = BUFFERS if slot == 0 else None
        partials.push(slot, gradients(num_slots)[slot], {"loss": slot + 0.25, "samples": 1.0}, buffers)
    root = exchange.reduce(partials)
    found = [b.clone() for b in BUFFERS]
    for buffer in found:
        buffer.zero_()
    root.get_buffers(found)
    result = [g.clone() for g in root.grads], root.used.tolist(), root.scalars.tolist(), found, pool.num_made
    pool.give(root)
    return result


@pytest.mark.parametrize("num_slots", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_sum_has_the_bits_of_the_naive_fold(num_slots, size):
    params = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in SHAPES]
    expected = reference(num_slots)
    results = simulate(size).run(reduce, num_slots, params)
    for grads, used, scalars, buffers, num_made in results:
        for grad, wanted in zip(grads, expected, strict=True):
            assert torch.equal(grad, wanted)
        assert used == [sum(s % 3 != 1 for s in range(num_slots)), num_slots, num_slots, 0]
        assert scalars[0] == sum(s + 0.25 for s in range(num_slots))
        assert scalars[2] == num_slots
        for got, wanted in zip(buffers, BUFFERS, strict=True):
            assert torch.equal(got, wanted)
        assert num_made <= num_slots.bit_length() + 1


def test_a_worker_alone_does_not_communicate_and_others_need_two_collectives_per_dtype():
    params = [torch.nn.Parameter(torch.zeros(100))]
    names = []

    def main(group):
        pool = Pool(FlatLayout.of(params, []), 4)
        exchange = Reduction(group, 4, pool)
        partials = Partials(pool, 4)
        for slot in exchange.slots:
            partials.push(slot, [torch.ones(100)], {})
        root = exchange.reduce(partials)
        return root.grads[0].sum().item()

    with observe(lambda event: names.append(event.name)):
        assert main(None) == 400
        assert names == []
        assert simulate(2).run(main) == [400, 400]
    assert sorted(names) == ["all_gather_into_tensor"] * 2 + ["all_to_all"] * 2


def test_negative_zeros_do_not_depend_on_the_partition():
    params = [torch.nn.Parameter(torch.zeros(2))]

    def main(group):
        pool = Pool(FlatLayout.of(params, []), 4)
        exchange = Reduction(group, 2, pool)
        partials = Partials(pool, 2)
        for slot in exchange.slots:
            partials.push(slot, [torch.tensor([-0.0, 1.0]) if slot == 0 else None], {})
        return torch.signbit(exchange.reduce(partials).grads[0]).tolist()

    assert main(None) == simulate(2).run(main)[0] == simulate(2).run(main)[1]


def test_repeated_steps_reuse_their_memory():
    params = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in SHAPES]
    pool = Pool(FlatLayout.of(params, BUFFERS), 4)
    made = [reduce(None, 8, params, pool)[4] for _ in range(4)]
    assert made == [made[0]] * 4


def test_more_workers_than_laid_out_for_get_copies_that_fit():
    params = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in SHAPES]
    results = simulate(5).run(lambda group: reduce(group, 8, params, Pool(FlatLayout.of(params, BUFFERS), 2)))
    for grads, *_ in results:
        for grad, wanted in zip(grads, reference(8), strict=True):
            assert torch.equal(grad, wanted)


def test_a_copy_from_before_the_growth_is_not_used_again():
    pool = Pool(FlatLayout.of([torch.nn.Parameter(torch.zeros(1))], []), 2)
    small = pool.take()
    pool.fit(3)
    pool.give(small)
    assert pool.take() is not small
    pool.give(large := pool.take())
    pool.fit(4)
    assert pool.take() is large, "there was room for four"


def test_a_model_on_two_devices_is_refused():
    with pytest.raises(ValueError, match="spread over devices"):
        FlatLayout.of([torch.nn.Parameter(torch.zeros(1)), torch.zeros(1, device="meta")], [])
