"""Storms: seeded random kills, stops, joins and leaves against a job of real processes. Every one must end with the
bits of the undisturbed run and a clean audit, and leave no process and no file behind. A strike that leaves a copy of
everything must not send the job back to a save: then no step would be lost in the bits either, but it would be in time.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import NUM_STEPS, Cluster

pytestmark = pytest.mark.timeout(400)

NUM_TAKEN = {"kill": 1, "first": 1, "two": 2, "again": 2, "stop": 1, "leave": 0, "resize": 0}
"""How many workers a strike takes with all that they have; who is told to leave gives it away."""
KINDS = ["kill", "kill", "first", "two", "again", "stop", "leave", "resize"]
NUM_STRIKES = 4


@dataclass(frozen=True)
class Strike:
    """What was done to the job: the workers that cannot be in it any more, and how many there are to be, if told."""

    kind: str
    gone: tuple[str, ...] = ()
    size: int | None = None


def possible(kinds: Sequence[str], num_workers: int) -> list[str]:
    """Leave out the strikes that so many workers are too few for."""
    least = {"two": 3, "leave": 3}
    return [kind for kind in kinds if num_workers >= least.get(kind, 2)]


def do_strike(cluster: Cluster, kind: str, workers: list[str], chance: random.Random) -> Strike:
    """Do one thing to a job of these workers. Each of them lives: a signal that finds nobody is an error."""
    if kind == "resize":
        size = chance.choice([n for n in range(2, 6) if n != len(workers)])
        cluster.resize(size)
        return Strike(kind, size=size)
    gone = [workers[0]] if kind == "first" else chance.sample(workers, max(1, NUM_TAKEN[kind]))
    for number, worker in enumerate(gone):
        if number and kind == "again":
            time.sleep(chance.uniform(0.0, 0.15))  # the survivors of the first regroup
        cluster.signal(worker, {"stop": signal.SIGSTOP, "leave": signal.SIGTERM}.get(kind, signal.SIGKILL))
    return Strike(kind, tuple(gone))


# -- where a job can be hurt again ------------------------------------------------------------------------------------


def is_calm(cluster: Cluster, last: Strike | None) -> bool:
    """Whether all workers that live sit in one round, and the last strike has had its effect."""
    newest = cluster.newest_round()
    if len(newest) < 2 or set(newest) != set(cluster.pids()):
        return False
    if last is not None and (set(last.gone) & set(newest) or last.size not in (None, len(newest))):
        return False
    told = cluster.events("regrouped")
    place = max((one["generation"], one["round"]) for one in told)
    return {one["worker"] for one in told if (one["generation"], one["round"]) == place} == set(newest)


def is_protected(cluster: Cluster, copies: int) -> bool:
    """Whether the workers of the newest round have told that every cell has as many holders as it shall have."""
    newest = cluster.newest_round()
    last = {one["worker"]: one for one in cluster.events("cells_held")}
    held = [last[worker] for worker in newest if worker in last]
    if len(held) < len(newest) or any(not set(one["mirrors"]) <= set(newest) for one in held):
        return False
    num_cells = sum(one["owned"] for one in held)
    return sum(one["cells"] for one in held) == min(copies, len(newest)) * num_cells


def needs_a_step(cluster: Cluster, last: Strike | None) -> bool:
    """Whether somebody was told to leave who is there yet: it goes behind a step that all take."""
    newest = cluster.newest_round()
    if last is None:
        return False
    return (last.kind == "leave" and last.gone[0] in newest) or (last.size is not None and len(newest) > last.size)


def wait_until_calm(cluster: Cluster, last: Strike | None, copies: int | None) -> list[str]:
    """Wait until the job is whole, with as few further steps as leavers and copies need; its workers."""

    def is_at_rest() -> bool:
        return is_calm(cluster, last) or needs_a_step(cluster, last)

    while True:
        cluster.wait_until(is_at_rest, f"a whole round after {last}")
        if not needs_a_step(cluster, last) and (copies is None or is_protected(cluster, copies)):
            return cluster.newest_round()
        step = cluster.step() + 1
        assert step < NUM_STEPS - 2, f"after {last} the job was not whole until step {step}"
        cluster.hold(step)
        cluster.wait_until(lambda step=step: cluster.step() >= step or not is_at_rest(), f"step {step}")


def setbacks(cluster: Cluster) -> int:
    """How often the job took up a save again."""
    return len(cluster.events("went_back")) + len(cluster.events("resumed"))


@dataclass(frozen=True)
class Found:
    """What a storm did and left."""

    kinds: tuple[str, ...]
    digests: set[str]


def storm(
    directory: Path,
    seed: int,
    script_flag: str = "--save",
    first_step: int = 2,
    copies: int | None = None,
    *,
    gentle: bool = False,
) -> Found:
    """Strike a job, of that many ``copies`` if its model is sharded; ``gentle`` leaves a copy of everything."""
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
    last: Strike | None = None
    kinds: list[str] = []
    may_go_back, before = True, 0  # nothing was struck yet

    def check() -> None:
        assert may_go_back or setbacks(cluster) == before, (
            f"{kinds[-1]} left a holder of everything, and yet the job went back:\n{cluster.text()[-4000:]}"
        )

    try:
        for step in sorted(chance.sample(range(first_step, NUM_STEPS // 2), NUM_STRIKES)):
            cluster.hold(max(step, cluster.step()))
            cluster.wait_step(step)
            workers = wait_until_calm(cluster, last, copies)
            check()
            most = min(len(workers), copies or len(workers)) - 1
            kind = chance.choice(possible([k for k in KINDS if NUM_TAKEN[k] <= most or not gentle], len(workers)))
            may_go_back, before = NUM_TAKEN[kind] > most, setbacks(cluster)
            cluster.hold(cluster.step() + 2)
            time.sleep(chance.uniform(0.0, 0.1))  # somewhere in these steps, or where they wait after them
            kinds.append(kind)
            last = do_strike(cluster, kind, workers, chance)
        wait_until_calm(cluster, last, copies)
        check()
        cluster.release()
        verdict = cluster.finish()
    finally:
        cluster.close()
    assert cluster.left_behind() == []
    assert verdict.num_steps == NUM_STEPS
    return Found(tuple(kinds), cluster.digests())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_leaves_no_trace_in_the_bits(tmp_path, undisturbed, seed):
    found = storm(tmp_path / "job", seed)
    assert found.digests == {undisturbed}, f"after {found.kinds}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_thirty_storms(tmp_path, undisturbed, seed):
    found = storm(tmp_path / "job", seed)
    assert found.digests == {undisturbed}, f"after {found.kinds}"
