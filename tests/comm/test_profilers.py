"""torch.profiler and simulated ranks: one profiler at a time in a process, where torch ends it at the second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from phalanx.comm import simulate
from phalanx.errors import RankFailed

CPU = [ProfilerActivity.CPU]


def reduced(group: Any) -> torch.Tensor:
    x = torch.ones(3) + group.rank
    group.all_reduce(x)
    return x


def test_one_rank_profiles() -> None:
    def main(group: Any) -> list[str]:
        if group.rank:
            for _ in range(4):
                reduced(group)
            return []
        with profile(activities=CPU) as seen:
            reduced(group)
        found = [event.key for event in seen.key_averages()]
        with profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as seen:
            for _ in range(3):
                reduced(group)
                seen.step()
        return found

    for _ in range(2):
        assert "aten::add" in simulate(2).run(main)[0]


def test_the_caller_profiles_around_the_ranks() -> None:
    with profile(activities=CPU) as seen:
        simulate(2).run(reduced)
        torch.ones(3).cos()
    assert "aten::cos" in [event.key for event in seen.key_averages()]


def test_a_second_profiler_is_refused_by_name() -> None:
    def main(group: Any) -> None:
        with profile(activities=CPU):
            reduced(group)

    for _ in range(2):  # what was refused leaves nothing behind
        with pytest.raises(RankFailed, match=r"rank-1 of a simulation.*while one runs in rank-0.*if group.rank == 0"):
            simulate(2).run(main)
    with profile(activities=CPU), pytest.raises(RankFailed, match="while one runs in"):
        simulate(1).run(main)
    simulate(1).run(main)
