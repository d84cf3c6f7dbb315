"""What a slow worker costs: four workers, one of half the speed, with slots dealt evenly and by speed.

The work of a slot is a sleep of ``--slot-ms``, twice as long on the slow worker: four workers that computed would fight
for the cores of a machine that has fewer, and measure that. With ``--how cgroup`` they do compute, what takes that long
with ``SHARE`` of a core; so much a cgroup gives each of them (less than the machine has, together), and half of it to
the slow one.

Jobs live beside each other in the same four processes and take turns, some steps each: nobody slow, one slow and even
slots, one slow and slots that follow. All end with one digest. The same again with a sharded job, whose slow worker
skips waves, with slots ``LONGER`` times as long; and with slots that take no longer than the gathers of a wave, where
skipping them does not pay and waves stay even.

Then what is on by default costs (guard, times, dealing, with events and audit written), on real work: two workers, jobs
with and without by turns, models of several sizes, one of them sharded too. Without means that nobody looks at
gradients, reads a clock or writes a line. A slot has ``COST_ROWS`` rows, which is little: of a language model
each token is one. And what it costs to have a slot computed twice in every ``CHECK_EVERY`` steps.

    python -m benchmarks.stragglers [--rounds 6] [--slots 64] [--slot-ms 10] [--cost-rounds 60] [--sharded-rounds 3]
                                    [--how sleep|cgroup]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._processor_shares import NoShares, ProcessorShare
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
LONGER = 4
SETTLED = 5 * WINDOW
"""Steps after which waves that turned out to cost more than they gain are even again."""
CHECK_EVERY, COST_SLOTS, COST_ROWS = 4, 8, 64
WIDTHS = {16: 2, 1024: 1, 3072: 0.25}
"""Of the models whose cost is measured, with rounds as a multiple of ``--cost-rounds``."""
SHARDED_WIDTH = 1024
MORE_ROWS = 512
"""Of a slot whose computation takes longer than the digests of a check."""
SHARE = 0.4
"""Of a core, of each worker that computes: four of them leave something of two cores."""
LIMIT = 150.0
"""Seconds for each of the three parts, starting included."""


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int) -> None:
        self.x = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index, :10]


def make(group: Group, width: int, num_slots: int, rows: int = 8, **options: Any) -> Job:
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
        slot_batch_size=rows,
        guard=guard,
        verify_slots=verify_slots,
        copies=copies,
        run=run,
    )


class StepCost(NamedTuple):
    """What a step took, and how much processor time of this process."""

    seconds: float
    work: float


def advance(job: Job, num_steps: int, pause: Callable[[], None] = lambda: None) -> list[StepCost]:
    """Make some steps; what each took but for the first, which has what joining and the turn before cost."""
    times = []
    began, worked = time.perf_counter(), time.process_time()
    for step in job.steps(max_steps=job.step + num_steps):
        for micro in step:
            pause()
            micro.backward(F.mse_loss(job.model(micro.inputs), micro.targets))
        step.commit()
        now, work = time.perf_counter(), time.process_time()
        times.append(StepCost(now - began, work - worked))
        began, worked = now, work
    return times[1:]


def spin(seconds: float) -> None:
    """Compute for so much processor time."""
    until = time.thread_time() + seconds
    x = torch.ones(2000)
    while time.thread_time() < until:
        x.sin_()


@contextmanager
def slowed(rank: int, how: str, seconds: float) -> Iterator[Callable[[int], Callable[[], None]]]:
    """Yield what makes, of how slow this worker is to be, the work of a slot."""
    if how == "sleep":
        yield lambda factor: lambda: time.sleep(seconds * factor)
        return
    with closing(ProcessorShare(f"phalanx-bench-{os.getpid()}")) as share:

        def work_of(factor: int) -> Callable[[], None]:
            share.set(SHARE / factor)
            return lambda: spin(SHARE * seconds)

        yield work_of


def by_turns(
    rank: int,
    address: str,
    rounds: int,
    num_slots: int,
    seconds: float,
    copies: int | None,
    warm_up: int,
    how: str,
    pipe: Any,
) -> None:
    with slowed(rank, how, seconds) as work_of:
        pipe.send(_by_turns(rank, address, rounds, num_slots, copies, warm_up, work_of))


def _by_turns(
    rank: int,
    address: str,
    rounds: int,
    num_slots: int,
    copies: int | None,
    warm_up: int,
    work_of: Callable[[int], Callable[[], None]],
) -> Any:
    group = Group.create(connect(address), rank, WORKERS)
    ways = {
        "nobody slow": (make(group, 16, num_slots, copies=copies), 1),
        "even slots": (make(group, 16, num_slots, copies=copies, balance=False), SLOW),
        "slots by speed": (make(group, 16, num_slots, copies=copies), SLOW),
    }

    def turn(name: str, num_steps: int) -> list[float]:
        job, factor = ways[name]
        group.barrier()
        return [one.seconds for one in advance(job, num_steps, work_of(factor if rank == WORKERS - 1 else 1))]

    for name in ways:
        turn(name, warm_up)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            times[name] += turn(name, TURN)
    sizes = ways["slots by speed"][0].regrouping.reduction.sizes
    return times, {job.digest() for job, _ in ways.values()}, sizes


def make_bare(group: Group, width: int, **options: Any) -> Job:
    """Make a job without anything of what is measured: no guard, no times, no dealing, no logs."""
    job = make(group, width, COST_SLOTS, COST_ROWS, guard=Guard(nonfinite="ignore"), balance=False, **options)
    job.clock.lap = lambda part: None  # type: ignore[method-assign]
    job.clock.end_slot = lambda: (0.0, 0.0)  # type: ignore[method-assign]
    return job


def cost(rank: int, address: str, width: int, rounds: int, copies: int | None, pipe: Any) -> None:
    """Two jobs with and two without by turns, of a turn the mean step.

    Two of each, since where the memory of a job lies may matter more than what is measured: how two alike differ says
    how much the difference of the kinds means.
    """
    group = Group.create(connect(address), rank, 2)
    with tempfile.TemporaryDirectory() as logs:
        jobs = {
            "on": make(group, width, COST_SLOTS, COST_ROWS, log_dir=f"{logs}/1", copies=copies),
            "off": make_bare(group, width, copies=copies),
            "off too": make_bare(group, width, copies=copies),
            "on too": make(group, width, COST_SLOTS, COST_ROWS, log_dir=f"{logs}/2", copies=copies),
        }
        times, _ = turns_of(group, jobs, rounds)
        num_params = width * width + 11 * width + 10
        pipe.send((times, {job.digest() for job in jobs.values()}, num_params))
        for job in jobs.values():
            job.close()


def cost_of_checks(rank: int, address: str, rows: int, rounds: int, pipe: Any) -> None:
    group = Group.create(connect(address), rank, 2)
    jobs = {
        "plain": make(group, 1024, COST_SLOTS, rows),
        "checked": make(group, 1024, COST_SLOTS, rows, verify_slots=VerifySlots(every=CHECK_EVERY)),
    }
    times, work = turns_of(group, jobs, rounds)
    pipe.send((times, {job.digest() for job in jobs.values()}, work))


def turns_of(group: Group, jobs: dict[str, Job], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds and the processor time of a step, a mean of each turn.

    What counts of a turn are ``CHECK_EVERY`` steps that follow each other: one of them is checked, in every turn.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    work: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        advance(job, 2 * WINDOW)
    names = list(jobs)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            group.barrier()
            found = advance(jobs[name], CHECK_EVERY + 1)
            times[name].append(statistics.mean(one.seconds for one in found))
            work[name].append(statistics.mean(one.work for one in found))
    return times, work


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--slot-ms", type=float, default=10.0)
    parser.add_argument("--cost-rounds", type=int, default=60)
    parser.add_argument("--sharded-rounds", type=int, default=3)
    parser.add_argument("--how", choices=["sleep", "cgroup"], default="sleep", help="what makes a worker slow")
    options = parser.parse_args()
    if options.how == "cgroup":
        try:
            ProcessorShare(f"phalanx-bench-{os.getpid()}").close()
        except NoShares as error:
            parser.error(str(error))
    of_shares = "" if options.how == "sleep" else "by cgroup, "
    with disturbance_told():
        seconds = options.slot_ms / 1e3
        if options.rounds:
            even = (options.rounds, options.slots, seconds, None, WARM_UP, options.how)
            told(answers_of(by_turns, WORKERS, *even, limit=LIMIT), kind=of_shares)
        for width, share in WIDTHS.items() if options.cost_rounds else ():
            told_cost(answers_of(cost, 2, width, max(1, round(share * options.cost_rounds)), None, limit=LIMIT))
        if options.cost_rounds:
            told_cost(answers_of(cost, 2, SHARDED_WIDTH, options.cost_rounds, 2, limit=LIMIT), kind="sharded ")
        for rows, kind in ((COST_ROWS, ""), (MORE_ROWS, f", {MORE_ROWS} rows")) if options.cost_rounds else ():
            told_checks(answers_of(cost_of_checks, 2, rows, max(1, options.cost_rounds // 4), limit=LIMIT), kind)
        if options.sharded_rounds:
            for kind, num_slots, factor, warm_up in (
                ("sharded, ", options.slots, LONGER, WARM_UP),
                ("sharded, short ", options.slots // 2, 1, SETTLED),
            ):
                sharded = (options.sharded_rounds, num_slots, factor * seconds, 2, warm_up, options.how)
                try:
                    told(answers_of(by_turns, WORKERS, *sharded, limit=LIMIT), kind=of_shares + kind)
                except TimeoutError as error:  # what others do costs a sharded job most: it meets in every wave
                    print(f"{kind}: {error}; not measured", flush=True)


def told(found: list[Any], kind: str = "") -> None:
    digests = set.union(*(digests for _, digests, _ in found))
    assert len(digests) == 1, f"the bits differ: {digests}"
    medians = {name: statistics.median(found[0][0][name]) for name in found[0][0]}
    base = medians["nobody slow"]
    for name, seconds in medians.items():
        print(f"{kind + name:>30}: {1e3 * seconds:7.1f} ms a step, {seconds / base:.2f} of nobody slow", flush=True)
        record(f"stragglers/{kind}{name}", "s", seconds, base)
    print(f"slots of the four: {found[0][2]}; one digest in all jobs, on all workers", flush=True)


def told_cost(found: list[Any], kind: str = "") -> None:
    times, digests, num_params = found[0]
    assert len(set.union(digests, *(others for _, others, _ in found))) == 1, "the bits differ"
    rounds = list(zip(times["on"], times["on too"], times["off"], times["off too"], strict=True))
    off = statistics.median((c + d) / 2 for _, _, c, d in rounds)
    more = statistics.median((a + b - c - d) / 2 for a, b, c, d in rounds)
    alike = statistics.median((a - b + d - c) / 2 for a, b, c, d in rounds)
    size = f"{num_params / 1e6:.2g}M"
    note = f"{1e6 * more:.0f} us more; two alike differ by {1e6 * abs(alike):.0f} us"
    words = f"{note}; a step {1e3 * off:.2f} ms, with all of it {1 + more / off:.4f} of that"
    print(f"{kind}guard, times, dealing, events and audit, {num_params:,} parameters: {words}", flush=True)
    record(f"stragglers/{kind}on by default/{size}", "s", off + more, off, note=note)


def told_checks(found: list[Any], kind: str) -> None:
    digests = set.union(*(digests for _, digests, _ in found))
    assert len(digests) == 1, f"the bits differ: {digests}"
    on, checked = (statistics.median(found[0][0][name]) for name in ("plain", "checked"))
    plain, twice = (sum(statistics.median(work[name]) for *_, work in found) for name in ("plain", "checked"))
    expected = 1 + 1 / (COST_SLOTS * CHECK_EVERY)
    print(
        f"a slot of {COST_SLOTS} computed twice in every {CHECK_EVERY} steps{kind}: {twice / plain:.4f} of processor "
        f"time (one slot more is {expected:.4f}), {checked / on:.4f} of the time of a step",
        flush=True,
    )
    record(f"stragglers/checked{kind}/work", "s", twice, plain, note=f"one slot more is {expected:.4f}")
    record(f"stragglers/checked{kind}/step", "s", checked, on)


if __name__ == "__main__":
    main()
