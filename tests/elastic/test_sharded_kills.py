"""Real workers of a sharded job without saves: killed at its commit point, and made more and fewer. Nothing is lost."""

from __future__ import annotations

import pytest
from cluster import NUM_STEPS, Cluster
from test_storms import Strike, wait_until_calm

pytestmark = pytest.mark.timeout(400)

STEP = 10


def finish(cluster, undisturbed):
    cluster.release()
    verdict = cluster.finish()
    assert verdict.num_steps == NUM_STEPS
    assert cluster.digests() == {undisturbed}
    assert cluster.events("went_back") == cluster.events("resumed") == []
    return verdict


@pytest.mark.parametrize("place", [pytest.param("enter", marks=pytest.mark.soak), "pass"])
def test_a_worker_dies_at_the_commit_point(tmp_path, undisturbed, place):
    """Before it the others have not come through and repeat the step; behind it they make the update without it."""
    cluster = Cluster(tmp_path / "job", 3, NUM_STEPS, hold=STEP, script_flag="--copies=2")
    try:
        cluster.wait_step(STEP)
        workers = cluster.newest_round()
        (cluster.directory / f"{place}-{workers[1]}").write_text(str(STEP))
        cluster.hold(STEP + 2)
        strike = Strike("kill", (workers[1],))
        wait_until_calm(cluster, strike, 2)
        verdict = finish(cluster, undisturbed)
    finally:
        cluster.close()
    outcomes = [event["step"] for event in cluster.events("lost")]
    assert set(outcomes) <= {STEP, STEP + 1}
    assert outcomes
    if place == "enter":
        assert set(outcomes) == {STEP}, "nobody has applied a step for which not all were prepared"
        assert verdict.num_dropped >= 1
    assert cluster.left_behind() == []


def test_a_sharded_job_is_scaled_up_and_down(tmp_path, undisturbed):
    cluster = Cluster(tmp_path / "job", 2, NUM_STEPS, hold=4, script_flag="--copies=2")
    try:
        cluster.wait_step(4)
        for size in (4, 2):
            cluster.resize(size)
            assert len(wait_until_calm(cluster, Strike("resize", size=size), 2)) == size
        finish(cluster, undisturbed)
    finally:
        cluster.close()
    assert cluster.left_behind() == []
