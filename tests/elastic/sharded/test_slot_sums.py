"""Sums over slots need little memory: the gradient itself, and what sections lend each other."""

from __future__ import annotations

import pytest
import torch
from sharded_training import make_job, train

from phalanx.comm import simulate
from phalanx.elastic.reduce._slots import siblings
from phalanx.elastic.sharded._slot_sums import SlotSums, Spares

CPU = torch.device("cpu")


class CountedSpares(Spares):
    def __init__(self) -> None:
        super().__init__()
        self.num_made = self.num_lent = 0

    def take(self, count, dtype, device):
        had = list(self._free)
        found = super().take(count, dtype, device)
        self.num_lent += 1
        self.num_made += not any(found is one for one in had)
        return found


def naive(grads, begin, end):
    """The tree by its definition."""
    if end - begin == 1:
        return grads[begin].clone()
    tree = siblings(len(grads))
    cut = next(right[0] for right, left in tree.items() if (left[0], right[1]) == (begin, end))
    return naive(grads, begin, cut) + naive(grads, cut, end)


@pytest.mark.fast
@pytest.mark.parametrize(("num_slots", "most"), [(1, 0), (2, 0), (4, 1), (6, 1), (8, 2)])
def test_sections_that_are_summed_in_turn_share_what_they_do_not_keep(num_slots, most):
    spares = CountedSpares()
    generator = torch.Generator().manual_seed(0)
    for count in (100, 90, 100):
        grads = [torch.randn(count, generator=generator) for _ in range(num_slots)]
        home = torch.full((count,), torch.nan)
        sums = SlotSums(home, num_slots, spares)
        for slot, grad in enumerate(grads):
            sums.push(slot, grad)
        assert sums.root() is home
        assert torch.equal(home, naive(grads, 0, num_slots))
        sums.reset()
    assert spares.num_made <= most
    assert (spares.num_lent > 0) == (num_slots > 2)


@pytest.mark.fast
def test_a_small_section_leaves_large_memory_to_large_ones():
    spares = Spares()
    large = torch.empty(1000)
    spares.give_back(large)
    assert spares.take(400, torch.float32, CPU) is not large
    assert spares.take(900, torch.bfloat16, CPU) is not large
    assert spares.take(900, torch.float32, CPU) is large
    spares.give_back(large)
    spares.clear()
    assert spares.take(900, torch.float32, CPU) is not large


@pytest.mark.parametrize("copies", [1, 2])
def test_who_owns_all_that_it_holds_sums_into_the_gradient(copies):
    def main(group):
        job = make_job(is_random=False, group=group, copies=copies)
        train(job, max_steps=2)
        sections = job.sharding.store.sections.values()
        return [(held.sums.home is held.grad, held.sums.count == held.grad.numel()) for held in sections]

    found = [pair for told in simulate(3).run(main) for pair in told]
    assert all(is_home == is_all for is_home, is_all in found)
    assert any(is_home for is_home, _ in found) == (copies == 1)
