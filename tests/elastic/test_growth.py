"""What must not grow with the number of regroups."""

from __future__ import annotations

import os
import threading
import time

from scripted_world import World

from phalanx import membership as ms


def test_a_hundred_regroups_leave_nothing_behind(tmp_path, monkeypatch):
    """Every step boundary is a regroup; threads, files and memory must not grow with their number."""
    world = World(tmp_path, monkeypatch)
    num_regroups, seen = 100, []

    def wait_for_wish(job, step):
        while job.generation < num_regroups and not job.team.roster.signals.wish:
            time.sleep(0.002)

    def watch(job, step):
        wait_for_wish(job, step)
        if job.rank == 0 and job.generation in (30, num_regroups):
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4096 / 2**20))

    for generation in range(num_regroups + 1):
        world.agree(generation, "a", "b")
        if generation < num_regroups:
            world.keys.set(ms.wanted_key(generation), ms.Broken(reason="again").to_json())
    world.num_steps = num_regroups + 3
    world.start("a", on_step=watch)
    world.start("b", on_step=wait_for_wish)
    results = world.join()
    assert results["a"] == results["b"]
    assert isinstance(results["a"], str)
    assert max(news.generation for news in world.news) == num_regroups
    (files, threads, memory), *_, (files_later, threads_later, memory_later) = seen
    assert files_later <= files + 4
    assert threads_later <= threads + 2
    assert memory_later <= memory + 24, "MB"
