"""Who holds which positions, and who computes what: pure, against a mask over positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.fsdp.context._sequence_layout import SequenceLayout, work_of

pytestmark = pytest.mark.fast


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    num_ranks = draw(st.integers(1, 9))
    return SequenceLayout(
        length=draw(st.integers(num_ranks, 70)), num_ranks=num_ranks, balanced=draw(st.sampled_from([True, False]))
    )


@given(layouts())
def test_every_position_is_held_once_in_ascending_order_and_evenly(layout: SequenceLayout) -> None:
    held = [layout.positions(rank) for rank in range(layout.num_ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(layout.length))
    assert all(torch.equal(positions, positions.sort().values) for positions in held)
    sizes = [len(positions) for positions in held]
    assert sizes == [layout.size(rank) for rank in range(layout.num_ranks)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    together = torch.cat(held)
    assert torch.equal(together[layout.restoring_order()], torch.arange(layout.length))


@given(layouts(), st.booleans())
def test_the_blocks_of_all_ranks_are_the_mask(layout: SequenceLayout, causal: bool) -> None:
    computed = torch.zeros(layout.length, layout.length, dtype=torch.int64)
    for rank in range(layout.num_ranks):
        for source in range(layout.num_ranks):
            work = work_of(layout, rank, source, causal=causal)
            if work is None:
                continue
            rows, columns = layout.positions(rank)[work.rows], layout.positions(source)[work.columns]
            seen = torch.ones(len(rows), len(columns), dtype=torch.int64)
            computed[rows[:, None], columns] += seen.tril() if work.causal else seen
    mask = torch.ones_like(computed)
    assert torch.equal(computed, mask.tril() if causal else mask)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_head_and_tail_give_every_rank_the_same_work_at_every_step(num_ranks: int) -> None:
    layout = SequenceLayout(length=num_ranks * 8, num_ranks=num_ranks)

    def scores(rank: int, step: int) -> int:
        work = work_of(layout, rank, (rank - step) % num_ranks, causal=True)
        assert work is not None
        return (work.rows.stop - work.rows.start) * (work.columns.stop - work.columns.start)

    for step in range(num_ranks):
        assert len({scores(rank, step) for rank in range(num_ranks)}) == 1
    without = SequenceLayout(length=num_ranks * 8, num_ranks=num_ranks, balanced=False)
    steps = [sum(work_of(without, rank, s, causal=True) is not None for s in range(num_ranks)) for rank in (0, -1)]
    assert steps[0] == 1, "what balancing is for: the first rank has one block, the last has all"


def test_a_sequence_shorter_than_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="3 positions on 4 ranks leaves ranks without any; use a mesh of at most 3"):
        SequenceLayout(length=3, num_ranks=4)
