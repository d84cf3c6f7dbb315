"""What a slow worker costs: four workers, one of half the speed, with slots dealt evenly and by speed.

The work of a slot is a sleep of ``--slot-ms``, twice as long on the slow worker: four workers that computed would fight
for the cores of a machine that has fewer, and measure that. Jobs live beside each other in the same four processes and
take turns, some steps each: nobody slow, one slow and even slots, one slow and slots that follow. All end with one
digest. The same again with a sharded job, whose slow worker skips waves.

Then what is on by default costs (guard, times, dealing), and what it costs to have a slot computed twice in every
``CHECK_EVERY`` steps, on real work: two workers, jobs with and without by turns.

    python -m benchmarks.stragglers [--rounds 6] [--slots 64] [--slot-ms 10] [--cost-rounds 60] [--sharded-rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._results import record
from benchmarks._turns import answers_of, disturbance_told
from phalanx.comm import Group
from phalanx.comm.stores import connect
from phalanx.elastic import Guard, Job, RunOptions, VerifySlots
from phalanx.elastic._dealing import WINDOW
from phalanx.fsdp import fully_shard

WORKERS, SLOW, TURN = 4, 2, 4
WARM_UP = WINDOW + 4
"""Steps after which slots have followed."""
CHECK_EVERY, COST_SLOTS = 4, 8
LIMIT = 150.0
"""Seconds for each of the three parts, starting included."""


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int) -> None:
        self.x = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index, :10]


def make(group: Group, width: int, num_slots: int, **options: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    guard, verify_slots = options.pop("guard", Guard()), options.pop("verify_slots", None)
    copies = options.pop("copies", None)
    if copies is not None:
        fully_shard(model)
    run = RunOptions(progress=False, group=group, threads=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Job(
        model,
        optimizer,
        Rows(width),
        num_slots=num_slots,
        slot_batch_size=8,
        guard=guard,
        verify_slots=verify_slots,
        copies=copies,
        run=run,
    )


def advance(job: Job, num_steps: int, pause: Callable[[], None] = lambda: None) -> list[float]:
    """Make some steps; what each took."""
    times = []
    began = time.perf_counter()
    for step in job.steps(max_steps=job.step + num_steps):
        for micro in step:
            pause()
            micro.backward(F.mse_loss(job.model(micro.inputs), micro.targets))
        step.commit()
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    return times[1:]  # the first has what joining and the turn before cost


def by_turns(
    rank: int, address: str, rounds: int, num_slots: int, seconds: float, copies: int | None, pipe: Any
) -> None:
    group = Group.create(connect(address), rank, WORKERS)
    ways = {
        "nobody slow": (make(group, 16, num_slots, copies=copies), 1),
        "even slots": (make(group, 16, num_slots, copies=copies, balance=False), SLOW),
        "slots by speed": (make(group, 16, num_slots, copies=copies), SLOW),
    }

    def turn(name: str, num_steps: int) -> list[float]:
        job, factor = ways[name]
        group.barrier()
        return advance(job, num_steps, lambda: time.sleep(seconds * (factor if rank == WORKERS - 1 else 1)))

    for name in ways:
        turn(name, WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            times[name] += turn(name, TURN)
    sizes = ways["slots by speed"][0].regrouping.reduction.sizes
    pipe.send((times, {job.digest() for job, _ in ways.values()}, sizes))


def cost(rank: int, address: str, rounds: int, pipe: Any) -> None:
    group = Group.create(connect(address), rank, 2)
    jobs = {
        "on": make(group, 1024, COST_SLOTS),
        "off": make(group, 1024, COST_SLOTS, guard=Guard(nonfinite="ignore"), balance=False),
        "checked": make(group, 1024, COST_SLOTS, verify_slots=VerifySlots(every=CHECK_EVERY)),
    }
    # Of a turn the mean step: one of so many is checked.
    times: dict[str, list[float]] = {name: [] for name in jobs}
    work: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        advance(job, CHECK_EVERY)
    names = list(jobs)
    for number in range(rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            group.barrier()
            began = time.process_time()
            times[name].append(statistics.mean(advance(jobs[name], CHECK_EVERY + 1)))
            work[name].append((time.process_time() - began) / (CHECK_EVERY + 1))
    pipe.send((times, {job.digest() for job in jobs.values()}, work))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--slot-ms", type=float, default=10.0)
    parser.add_argument("--cost-rounds", type=int, default=60)
    parser.add_argument("--sharded-rounds", type=int, default=3)
    options = parser.parse_args()
    with disturbance_told():
        seconds = options.slot_ms / 1e3
        if options.rounds:
            told(answers_of(by_turns, WORKERS, options.rounds, options.slots, seconds, None, limit=LIMIT))
        if options.cost_rounds:
            told_cost(answers_of(cost, 2, options.cost_rounds, limit=LIMIT))
        if options.sharded_rounds:
            sharded = (options.sharded_rounds, options.slots // 2, seconds, 2)
            try:
                told(answers_of(by_turns, WORKERS, *sharded, limit=LIMIT), kind="sharded, ")
            except TimeoutError as error:  # what others do costs a sharded job most: it meets in every wave
                print(f"sharded: {error}; not measured", flush=True)


def told(found: list[Any], kind: str = "") -> None:
    digests = set.union(*(digests for _, digests, _ in found))
    assert len(digests) == 1, f"the bits differ: {digests}"
    medians = {name: statistics.median(found[0][0][name]) for name in found[0][0]}
    base = medians["nobody slow"]
    for name, seconds in medians.items():
        print(f"{kind + name:>24}: {1e3 * seconds:7.1f} ms a step, {seconds / base:.2f} of nobody slow", flush=True)
        record(f"stragglers/{kind}{name}", "s", seconds, base)
    print(f"slots of the four: {found[0][2]}; one digest in all jobs, on all workers", flush=True)


def told_cost(found: list[Any]) -> None:
    digests = set.union(*(digests for _, digests, _ in found))
    assert len(digests) == 1, f"the bits differ: {digests}"
    on, off, checked = (statistics.median(found[0][0][name]) for name in ("on", "off", "checked"))
    words = f"{1e3 * on:.2f} ms a step with, {1e3 * off:.2f} without: {on / off:.4f}"
    print(f"guard, times and dealing: {words}", flush=True)
    record("stragglers/on by default", "s", on, off)
    plain, twice = (sum(statistics.median(work[name]) for *_, work in found) for name in ("on", "checked"))
    expected = 1 + 1 / (COST_SLOTS * CHECK_EVERY)
    print(
        f"a slot of {COST_SLOTS} computed twice in every {CHECK_EVERY} steps: {twice / plain:.4f} of the processor "
        f"time (one slot more is {expected:.4f}), {checked / on:.4f} of the time of a step",
        flush=True,
    )
    record("stragglers/checked/work", "s", twice, plain, note=f"one slot more is {expected:.4f}")
    record("stragglers/checked/step", "s", checked, on)


if __name__ == "__main__":
    main()
