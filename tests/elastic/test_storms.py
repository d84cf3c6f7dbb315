"""Storms: seeded random kills, stops, joins and leaves against a job of real processes. Every one must end with the
bits of the undisturbed run and a clean audit, and leave no process and no file behind."""

from __future__ import annotations

import random
import signal
import time

import pytest
from cluster import NUM_STEPS, Cluster

pytestmark = pytest.mark.timeout(400)


def strike(cluster: Cluster, workers: list[str], chance: random.Random) -> str:
    """Do one thing to the job, of which at least two workers were seen alive; what it was."""
    kind = chance.choice(["kill", "kill", "first", "two", "again", "stop", "leave", "resize"])
    if kind == "resize":
        cluster.resize(chance.randint(2, 5))
    elif kind == "leave" and len(workers) > 2:
        _signal(cluster, chance.choice(workers), signal.SIGTERM)
    elif kind == "stop":
        _signal(cluster, chance.choice(workers), signal.SIGSTOP)
    elif kind == "first":
        _signal(cluster, workers[0])
    elif kind == "two":
        for worker in chance.sample(workers, min(2, len(workers) - 1)):
            _signal(cluster, worker)
    elif kind == "again":  # a second one while the survivors of the first regroup
        first, second = (chance.sample(workers, 2) + workers)[:2]
        _signal(cluster, first)
        time.sleep(chance.uniform(0.0, 0.15))
        _signal(cluster, second)
    else:
        _signal(cluster, chance.choice(workers))
    return kind


def _signal(cluster: Cluster, worker: str, signum: int = signal.SIGKILL) -> None:
    try:
        cluster.signal(worker, signum)
    except (KeyError, ProcessLookupError):
        pass  # it has gone by itself


def storm(directory, seed: int, script_flag: str = "--save", first_step: int = 2) -> tuple[list[str], set[str], int]:
    chance = random.Random(seed)
    cluster = Cluster(
        directory,
        chance.randint(2, 4),
        NUM_STEPS,
        hold=0,
        hang_timeout="3",
        max_restarts="1000",
        script_flag=script_flag,
    )
    try:
        kinds = []
        for step in sorted(chance.sample(range(first_step, NUM_STEPS - 8), 4)):
            cluster.hold(step + 2)  # they wait there for the strike, however late it comes
            workers: list[str] = []

            def is_time(step=step, workers=workers) -> bool:
                workers[:] = cluster.pids()
                return cluster.step() >= step and len(workers) > 1

            cluster.wait_until(is_time, f"step {step}")
            kinds.append(strike(cluster, workers, chance))
        cluster.release()
        verdict = cluster.finish()
    finally:
        cluster.close()
    assert cluster.left_behind() == []
    assert verdict.num_steps == NUM_STEPS
    return kinds, cluster.digests(), verdict.num_dropped


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_leaves_no_trace_in_the_bits(tmp_path, undisturbed, seed):
    kinds, digests, _ = storm(tmp_path / "job", seed)
    assert digests == {undisturbed}, f"after {kinds}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_thirty_storms(tmp_path, undisturbed, seed):
    kinds, digests, _ = storm(tmp_path / "job", seed)
    assert digests == {undisturbed}, f"after {kinds}"
