"""What watching costs: a job with events against one without, by turns, and the agent that adds them up.

All figures are CPU time of the process, which other processes do not change. Two simulated workers train a small model;
what a step of a worker costs more with events (its clock, the bytes of its collectives, the event of a step) is the
difference of the medians. The agent takes the events of 256 workers and 100,000 steps, then makes the page.

    python -m benchmarks.watch [--rounds N] [--steps N] [--fed N]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks._results import record
from phalanx.comm import simulate
from phalanx.elastic import Job, RunOptions
from phalanx.events import _event_types as types
from phalanx.protocol import ENV_EVENTS
from phalanx.watch._prometheus import exposition
from phalanx.watch._view import JobView

WORKERS = 2
STEP = 0.02
"""Seconds of a step to which the cost is compared."""
FED_WORKERS = 256
LINE = 500
"""Steps that a worker tells in one line."""


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), index / 4096), index % 4


def train(steps: int, events: str) -> float:
    """CPU seconds of a training of two workers, from their first step to their last."""
    spent: list[float] = []

    def run(group: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = RunOptions(progress=False, group=group)
        job = Job(model, optimizer, Rows(), num_slots=WORKERS, slot_batch_size=4, seed=0, run=options)
        for step in job.steps(max_steps=steps):
            if step.number == 1 and group.rank == 0:
                spent.append(time.process_time())
            for micro in step:
                micro.backward(nn.functional.cross_entropy(model(micro.inputs), micro.targets))
            step.commit()
        if group.rank == 0:
            spent.append(time.process_time())
        job.close()

    os.environ[ENV_EVENTS] = events
    try:
        simulate(WORKERS).run(run)
    finally:
        del os.environ[ENV_EVENTS]
    return spent[1] - spent[0]


def worker_cost(rounds: int, steps: int) -> tuple[float, float]:
    """CPU seconds of a step of a worker, with events and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="phalanx-watch-") as folder:
        for number in range(rounds + 1):
            for is_on in ((True, False), (False, True))[number % 2]:
                gc.collect()
                taken = train(steps, folder if is_on else "")
                if number:  # the first warms up
                    times[is_on].append(taken / (steps - 1) / WORKERS)
    return statistics.median(times[True]), statistics.median(times[False])


def feed(view: JobView, steps: int) -> None:
    """Give a view the events of a job with many workers."""
    workers = tuple(f"host{i // 8}.{i}" for i in range(FED_WORKERS))
    for rank, worker in enumerate(workers):
        view.take(
            types.RoundFormed(
                worker=worker, time=1.0, generation=0, round=0, workers=workers, joined=workers, left=(), step=0,
                seconds=0.1, rank=rank, first_slot=rank, num_slots=1,
            )
        )  # fmt: skip
    micros = tuple(20_000 + 7 * i % 900 for i in range(LINE))
    for first in range(0, steps, LINE):
        now = 2.0 + first * STEP
        for worker in workers:
            view.take(
                types.WorkerStepTimes(
                    worker=worker, time=now, step=first, compute=micros, wait=micros, data=micros,
                    collective_bytes={"all_to_all": 1 << 20, "all_gather_into_tensor": 1 << 20},
                )
            )  # fmt: skip
        for step in range(first, first + LINE):
            view.take(
                types.StepCommitted(
                    worker=workers[0], time=now, step=step, epoch=0, loss=1.0, samples=64, generation=0, round=0
                )
            )


def cpu(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--fed", type=int, default=100_000, help="steps that the agent is told of")
    options = parser.parse_args()
    watched, plain = worker_cost(options.rounds, options.steps)
    more = max(0.0, watched - plain)
    print(f"a step of a worker: {1e6 * watched:.1f} us with events, {1e6 * plain:.1f} us without: {1e6 * more:.1f} us")
    print(f"of a step of {1e3 * STEP:.0f} ms: {100 * more / STEP:.2f}%")
    record("a step of a worker, more", "us", 1e6 * more)
    record("share of a step of 20 ms", "%", 100 * more / STEP)
    view = JobView("fed")
    fed = cpu(lambda: feed(view, options.fed))
    each = fed / options.fed / FED_WORKERS
    print(
        f"the agent: {1e6 * each:.2f} us for a step of a worker, {fed:.1f} s for {options.fed:,} steps of 256 workers"
    )
    record("agent, a step of a worker", "us", 1e6 * each)
    page = min(cpu(lambda: json.dumps(view.page(3000.0))) for _ in range(5))
    size = len(json.dumps(view.page(3000.0)))
    scrape = min(cpu(lambda: exposition(view, 3000.0)) for _ in range(5))
    print(f"the page: {1e3 * page:.1f} ms, {size / 1000:.0f} KB; a scrape: {1e3 * scrape:.1f} ms")
    record("page of 256 workers", "ms", 1e3 * page)
    record("size of the page", "KB", size / 1000)
    record("scrape of 256 workers", "ms", 1e3 * scrape)


if __name__ == "__main__":
    main()
