"""What must not grow with the number of regroups, nor with that of jobs in one process."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from scripted_world import World
from sharded_training import make_job, train, weights

from phalanx import protocol as ms
from phalanx.comm import simulate
from phalanx.elastic import RunOptions
from processes import run_processes

pytestmark = pytest.mark.timeout(400)

FILES, THREADS, MEGABYTES = 4, 2, 24
"""How much more there may be after seventy regroups."""


def measure() -> tuple[int, int, float]:
    """Open files, threads, and megabytes of memory of its own: pages of libraries come and go by themselves."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), kilobytes / 1024


def regroup_often(worker, num_regroups: int) -> tuple[list[tuple[int, int, float]], dict[str, object], int]:
    """Two workers for which every step boundary is a regroup; what was measured early and at the end, and what both
    came to. Runs in a process of its own: nothing of other tests is freed or counted meanwhile."""
    torch.set_num_threads(1)
    seen: list[tuple[int, int, float]] = []

    def wait_for_wish(job, step):
        while job.generation < num_regroups and not job.regrouping.coordinator.signals.wish:
            time.sleep(0.002)

    def watch(job, step):
        wait_for_wish(job, step)
        if job.rank == 0 and job.generation == 30 and not seen:
            seen.append(measure())
        if job.rank == 0 and job.generation == num_regroups and len(seen) == 1:
            seen.append(measure_settled(seen[0]))

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        world = World(Path(directory), patch)
        for generation in range(num_regroups + 1):
            world.agree(generation, "a", "b")
            if generation < num_regroups:
                world.keys.set(ms.wanted_key(generation), ms.Broken(reason="again").to_json())
        world.num_steps = num_regroups + 3
        world.start("a", on_step=watch)
        world.start("b", on_step=wait_for_wish)
        results = world.join()
    return seen, results, max(news.generation for news in world.news)


def measure_settled(before: tuple[int, int, float]) -> tuple[int, int, float]:
    """What there is once the other worker and threads that end have let go of their last group; not before."""
    deadline = time.monotonic() + 60
    while True:
        now = measure()
        if (now[0] <= before[0] + FILES and now[1] <= before[1] + THREADS) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def test_a_hundred_regroups_leave_nothing_behind():
    """Threads, files and memory must not grow with the number of regroups."""
    num_regroups = 100
    (outcome,) = run_processes(1, regroup_often, num_regroups, timeout=350.0)
    seen, results, last = outcome.value
    assert results["a"] == results["b"]
    assert isinstance(results["a"], str)
    assert last == num_regroups
    (files, threads, memory), (files_later, threads_later, memory_later) = seen
    assert files_later <= files + FILES
    assert threads_later <= threads + THREADS
    assert memory_later <= memory + MEGABYTES, "MB"


def train_and_close(group, *, sharded: bool) -> list[weakref.ref]:
    """The job and its first parameter."""
    job = make_job(run=RunOptions(progress=False, group=group, threads=1, overlap=not sharded), sharded=sharded)
    train(job, max_steps=2)
    weights(job)
    job.close()
    return [weakref.ref(job), weakref.ref(next(job.model.parameters()))]


def what_is_left(made: list[weakref.ref]) -> tuple[int, int]:
    """How many of these live, and how many files are open."""
    gc.collect()
    return sum(one() is not None for one in made), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
def test_a_closed_job_is_forgotten(sharded):
    """With its model, its groups and their shared memory. The first one leaves what is made once for a process."""
    seen = [what_is_left(train_and_close(None, sharded=sharded)) for _ in range(3)]
    assert [alive for alive, _ in seen] == [0, 0, 0]
    assert seen[1][1] == seen[2][1], "open files"


def test_closed_jobs_of_simulated_ranks_are_forgotten():
    seen = []
    for _ in range(3):
        made = simulate(2).run(lambda group: train_and_close(group, sharded=True))
        seen.append(what_is_left(made[0] + made[1]))
    assert [alive for alive, _ in seen] == [0, 0, 0]
    assert seen[1][1] == seen[2][1], "open files"


def train_several(worker, num_jobs: int) -> list[tuple[int, int]]:
    seen = []
    for number in range(num_jobs):
        group = worker.group(backend="auto", generation=number)
        made = train_and_close(group, sharded=True)
        group.barrier()
        group.close()
        del group
        seen.append(what_is_left(made))
    return seen


def test_closed_jobs_of_processes_are_forgotten():
    for outcome in run_processes(2, train_several, 3):
        alive, files = zip(*outcome.value, strict=True)
        assert alive == (0, 0, 0)
        assert files[1] == files[2], "open files"
