"""A worker that waits for its data keeps its slots: its loader is behind, not its processor. Simulated ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import Job, RunOptions
from phalanx.elastic._dealing import WINDOW
from phalanx.elastic.tools import _step_clock
from phalanx.events._event_types import WorkerStepTimes
from phalanx.watch._files import read_job_events
from phalanx.watch._paces import Paces, compare, in_words

pytestmark = pytest.mark.fast
SLOW_RANK = 1


class Moments:
    """A clock for each thread, which only ``go_on`` moves."""

    def __init__(self) -> None:
        self._here = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._here, "now", 0.0)

    def go_on(self, seconds: float) -> None:
        self._here.now = self.perf_counter() + seconds


class SlowRows(torch.utils.data.Dataset):
    def __init__(self, moments: Moments, seconds: float) -> None:
        self.x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
        self.moments, self.seconds = moments, seconds

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.moments.go_on(self.seconds)
        return self.x[index]


@pytest.mark.parametrize("slow", ["data", "compute"])
def test_slots_are_not_dealt_away_from_a_worker_that_waits_for_its_data(tmp_path, monkeypatch, slow):
    moments = Moments()
    monkeypatch.setattr(_step_clock, "time", moments)

    def main(group):
        is_slow = group.rank == SLOW_RANK
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        data = SlowRows(moments, 0.5 if is_slow and slow == "data" else 0.001)
        run = RunOptions(progress=False, group=group, log_dir=tmp_path)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), data, num_slots=9, slot_batch_size=2, run=run)
        sizes = []
        for step in job.steps(max_steps=WINDOW + 4):
            sizes.append(job.regrouping.reduction.sizes)
            for micro in step:
                moments.go_on(1.0 if is_slow and slow == "compute" else 0.1)
                micro.backward(model(micro.batch).square().mean())
            step.commit()
        pace = job.clock.pace(len(step.slots)).times
        job.clock.flush()
        job.close()
        return sizes, pace

    results = simulate(3).run(main)
    lines = [line for path in tmp_path.glob("events-*") for line in read_lines(path)]
    dealt = [line for line in lines if line["event"] == "slots_dealt"]
    if slow == "compute":
        assert dealt, "the same delay elsewhere moves slots"
        assert results[0][0][-1][SLOW_RANK] < 3
        return
    assert not dealt
    assert {size for sizes, _ in results for size in sizes} == {(3, 3, 3)}
    paces = Paces()
    for event in read_job_events(tmp_path):
        if isinstance(event, WorkerStepTimes):
            paces.take(event)
    found = {worker: row["is"] for worker, row in paces.rows(("rank0", "rank1", "rank2")).items()}
    assert found == {"rank0": "", "rank1": "waits for data", "rank2": ""}
    # And what phalanx status shows, which workers say of themselves:
    rows = compare({str(rank): [micros / 1e6 for micros in pace] for rank, (_, pace) in enumerate(results)})
    assert in_words(rows[str(SLOW_RANK)]).endswith(": waits for data")
    assert not in_words(rows["0"]).endswith("data")
