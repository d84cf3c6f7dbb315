"""What must not grow with the number of regroups."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from scripted_world import World

from phalanx import protocol as ms
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
