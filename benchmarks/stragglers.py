"""What a slow worker costs: four workers, one of half the speed, with slots dealt evenly and by speed.

The work of a slot is a sleep of ``--slot-ms``, twice as long on the slow worker: four workers that computed would fight
for the cores of a machine that has fewer, and measure that. Jobs live beside each other in the same four processes and
take turns, some steps each: nobody slow, one slow and even slots, one slow and slots that follow. All end with one
digest. The same again with a sharded job, whose slow worker skips waves, with slots ``LONGER`` times as long; and with
slots that take no longer than the gathers of a wave, where skipping them does not pay and waves stay even.

Then what is on by default costs (guard, times, dealing, with events and audit written), on real work: two workers, jobs
with and without by turns, models of several sizes. A slot has ``COST_ROWS`` rows, which is little: of a language model
each token is one. And what it costs to have a slot computed twice in every ``CHECK_EVERY`` steps.

    python -m benchmarks.stragglers [--rounds 6] [--slots 64] [--slot-ms 10] [--cost-rounds 60] [--sharded-rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
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
LONGER = 4
SETTLED = 5 * WINDOW
"""Steps after which waves that turned out to cost more than they gain are even again."""
CHECK_EVERY, COST_SLOTS, COST_ROWS = 4, 8, 64
WIDTHS = {16: 2, 1024: 1, 3072: 0.25}
"""Of the models whose cost is measured, with rounds as a multiple of ``--cost-rounds``."""
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
    rank: int, address: str, rounds: int, num_slots: int, seconds: float, copies: int | None, warm_up: int, pipe: Any
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
        turn(name, warm_up)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            times[name] += turn(name, TURN)
    sizes = ways["slots by speed"][0].regrouping.reduction.sizes
    pipe.send((times, {job.digest() for job, _ in ways.values()}, sizes))


def cost(rank: int, address: str, width: int, rounds: int, pipe: Any) -> None:
    """Two jobs with and two without by turns, of a turn the mean step.

    Two of each, since where the memory of a job lies may matter more than what is measured: how two alike differ says
    how much the difference of the kinds means.
    """
    group = Group.create(connect(address), rank, 2)
    nothing = {"guard": Guard(nonfinite="ignore"), "balance": False}
    with tempfile.TemporaryDirectory() as logs:
        ways = {"on": {"log_dir": f"{logs}/1"}, "off": nothing, "off too": nothing, "on too": {"log_dir": f"{logs}/2"}}
        jobs = {name: make(group, width, COST_SLOTS, COST_ROWS, **options) for name, options in ways.items()}
        times, _ = turns_of(group, jobs, rounds)
        num_params = sum(param.numel() for param in jobs["on"].params)
        pipe.send((times, {job.digest() for job in jobs.values()}, num_params))
        for job in jobs.values():
            job.close()


def cost_of_checks(rank: int, address: str, rounds: int, pipe: Any) -> None:
    group = Group.create(connect(address), rank, 2)
    jobs = {
        "plain": make(group, 1024, COST_SLOTS, COST_ROWS),
        "checked": make(group, 1024, COST_SLOTS, COST_ROWS, verify_slots=VerifySlots(every=CHECK_EVERY)),
    }
    times, work = turns_of(group, jobs, rounds)  # of a turn one step is checked, of as many
    pipe.send((times, {job.digest() for job in jobs.values()}, work))


def turns_of(group: Group, jobs: dict[str, Job], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds and the processor time of a step, a mean of each turn."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    work: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        advance(job, 2 * WINDOW)
    names = list(jobs)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            group.barrier()
            began = time.process_time()
            times[name].append(statistics.mean(advance(jobs[name], CHECK_EVERY + 1)))
            work[name].append((time.process_time() - began) / (CHECK_EVERY + 1))
    return times, work


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
            told(answers_of(by_turns, WORKERS, options.rounds, options.slots, seconds, None, WARM_UP, limit=LIMIT))
        for width, share in WIDTHS.items() if options.cost_rounds else ():
            told_cost(answers_of(cost, 2, width, max(1, round(share * options.cost_rounds)), limit=LIMIT))
        if options.cost_rounds:
            told_checks(answers_of(cost_of_checks, 2, max(1, options.cost_rounds // 4), limit=LIMIT))
        if options.sharded_rounds:
            for kind, num_slots, factor, warm_up in (
                ("sharded, ", options.slots, LONGER, WARM_UP),
                ("sharded, short ", options.slots // 2, 1, SETTLED),
            ):
                sharded = (options.sharded_rounds, num_slots, factor * seconds, 2, warm_up)
                try:
                    told(answers_of(by_turns, WORKERS, *sharded, limit=LIMIT), kind=kind)
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


def told_cost(found: list[Any]) -> None:
    times, digests, num_params = found[0]
    assert len(set.union(digests, *(others for _, others, _ in found))) == 1, "the bits differ"
    rounds = list(zip(times["on"], times["on too"], times["off"], times["off too"], strict=True))
    off = statistics.median((c + d) / 2 for _, _, c, d in rounds)
    more = statistics.median((a + b - c - d) / 2 for a, b, c, d in rounds)
    alike = statistics.median((a - b + d - c) / 2 for a, b, c, d in rounds)
    size = f"{num_params / 1e6:.2g}M"
    note = f"{1e6 * more:.0f} us more; two alike differ by {1e6 * abs(alike):.0f} us"
    words = f"{note}; a step {1e3 * off:.2f} ms, with all of it {1 + more / off:.4f} of that"
    print(f"guard, times, dealing, events and audit, {num_params:,} parameters: {words}", flush=True)
    record(f"stragglers/on by default/{size}", "s", off + more, off, note=note)


def told_checks(found: list[Any]) -> None:
    digests = set.union(*(digests for _, digests, _ in found))
    assert len(digests) == 1, f"the bits differ: {digests}"
    on, checked = (statistics.median(found[0][0][name]) for name in ("plain", "checked"))
    plain, twice = (sum(statistics.median(work[name]) for *_, work in found) for name in ("plain", "checked"))
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
