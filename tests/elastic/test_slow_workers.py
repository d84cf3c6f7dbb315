"""Slots follow speed on real processes: a worker that is slow gets fewer, over a loss too, and the bits stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
from cluster import NUM_STEPS, Cluster

from phalanx.elastic._dealing import WINDOW

pytestmark = pytest.mark.timeout(400)

HOLD, THEN = 10, 44  # slow in most steps of the window in which it is seen first


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started = []

    def begin(**options):
        started.append(Cluster(tmp_path / f"job{len(started)}", 3, NUM_STEPS, hold=HOLD, **options))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def slow_one_relieved(cluster: Cluster, seconds: float) -> str:
    """Slow one of three workers down, and wait at step ``THEN`` after it has been given fewer slots."""
    cluster.wait_workers(3)
    cluster.wait_step(HOLD)
    slow = cluster.newest_round()[1]
    cluster.slow_down(slow, seconds)
    cluster.hold(THEN)
    cluster.wait_step(THEN)
    return slow


def sizes_of(event: dict) -> dict[str, int]:
    return dict(zip(event["workers"], event["sizes"], strict=True))


def paces_of(event: dict) -> dict[str, float]:
    return dict(zip(event["workers"], event["pace"], strict=True))


def dealt_in(cluster: Cluster, workers: list[str]) -> dict:
    """Wait until slots were dealt to these workers."""
    cluster.wait_until(lambda: cluster.events("slots_dealt")[-1]["workers"] == workers, f"a deal for {workers}")
    return cluster.events("slots_dealt")[-1]


def test_a_slow_worker_gets_fewer_slots_keeps_them_over_a_loss_and_the_bits_stay(start, undisturbed):
    cluster = start()
    slow = slow_one_relieved(cluster, 0.15)
    *_, event = cluster.events("slots_dealt")
    sizes, pace = sizes_of(event), paces_of(event)
    assert sizes[slow] == 1
    assert sum(sizes.values()) == 8
    assert pace[slow] >= 0.15, "what a slot takes it is measured"
    assert all(pace[slow] > one for worker, one in pace.items() if worker != slow)
    assert event["gain"] > 1
    cluster.close_door()
    killed = cluster.newest_round()[2]
    cluster.signal(killed)
    cluster.wait_workers(2)  # held there: nothing is measured anew, what is dealt is dealt by what was known
    event = dealt_in(cluster, cluster.newest_round())
    assert killed not in event["workers"]
    assert THEN <= event["step"] < THEN + WINDOW
    assert sizes_of(event)[slow] == 1
    cluster.open_door()
    cluster.wait_workers(3)
    event = dealt_in(cluster, cluster.newest_round())
    (new,) = set(event["workers"]) - set(sizes)
    known = [one for worker, one in paces_of(event).items() if worker != new]
    assert THEN <= event["step"] < THEN + WINDOW
    assert paces_of(event)[new] == pytest.approx(median(known), abs=2e-6), "of who is new nothing is known"
    (other,) = set(sizes) - {slow, killed}
    assert sizes_of(event)[slow] < sizes_of(event)[other]
    cluster.release()
    assert cluster.finish().num_steps == NUM_STEPS
    assert cluster.digests() == {undisturbed}


@pytest.mark.soak
def test_a_slow_worker_of_a_sharded_job_skips_waves_and_the_bits_stay(start, undisturbed):
    cluster = start(script_flag="--copies=2")
    slow = slow_one_relieved(cluster, 0.3)
    found = [event for event in cluster.events("slots_dealt") if sizes_of(event)[slow] == 1]
    assert found, cluster.events("slots_dealt")
    assert found[0]["step"] >= WINDOW
    assert sum(found[0]["sizes"]) == 8
    cluster.release()
    assert cluster.finish().num_steps == NUM_STEPS
    assert cluster.digests() == {undisturbed}
