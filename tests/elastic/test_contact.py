"""Contact lost while nobody dies, in real processes: the job regroups at once, with the bits of an undisturbed run."""

from __future__ import annotations

import signal

import pytest
from cluster import NUM_STEPS, Cluster

pytestmark = pytest.mark.timeout(400)


def newest(cluster: Cluster) -> dict:
    return max(cluster.events("regrouped"), key=lambda r: (r["generation"], r["round"]))


def test_connections_that_end_cost_a_regroup_and_whoever_cannot_keep_any_is_replaced(tmp_path, undisturbed):
    cluster = Cluster(tmp_path / "job", 3, NUM_STEPS, hold=10, max_restarts="3", script_flag="--gloo --timeout=60")
    try:
        cluster.wait_until(lambda: cluster.step() >= 5 and len(cluster.pids()) == 3, "step 5")
        workers = list(cluster.pids())

        for worker in workers:  # those to the store, which is fine: no regroup at all
            cluster.tell(worker, "reset store")
        cluster.wait_until(lambda: not list(cluster.directory.glob("fail-*")), "the ends of connections")
        cluster.hold(20)
        cluster.wait_step(15)
        assert newest(cluster)["generation"] == 0

        cluster.tell(workers[1], "reset")  # those to the other workers, once: all stay
        cluster.wait_until(lambda: newest(cluster)["generation"] == 1, "a regroup")
        cluster.hold(30)
        cluster.wait_step(25)
        assert newest(cluster)["workers"] == workers
        assert list(cluster.pids()) == workers

        (cluster.directory / f"cut-{workers[1]}").touch()  # again and again: most cannot reach that one
        cluster.wait_until(lambda: workers[1] not in cluster.pids(), "the end of the one that is cut off")
        cluster.wait_workers(3)
        cluster.release()
        cluster.finish()
        assert "cannot be reached" in cluster.text()
    finally:
        cluster.close()
    assert cluster.digests() == {undisturbed}
    assert workers[1] not in newest(cluster)["workers"]


def test_a_worker_that_is_stopped_for_longer_than_the_timeout(tmp_path, undisturbed):
    cluster = Cluster(tmp_path / "job", 3, NUM_STEPS, hold=20, max_restarts="5", script_flag="--timeout=3")
    try:
        cluster.wait_until(lambda: cluster.step() >= 10 and len(cluster.pids()) == 3, "step 10")
        first, second, _ = cluster.pids()
        cluster.release()
        cluster.signal(second, signal.SIGSTOP)  # and never continued: it is replaced
        cluster.wait_until(lambda: second not in cluster.pids(), "the end of the stopped worker")
        cluster.hold(45)
        cluster.wait_workers(3)
        cluster.wait_step(30)
        before = len(cluster.events("lost"))
        cluster.signal(first, signal.SIGSTOP)  # and continued when the others have given up on it
        cluster.release()
        cluster.wait_until(lambda: len(cluster.events("lost")) > before, "the others' timeout")
        if first in cluster.pids():
            cluster.signal(first, signal.SIGCONT)
        cluster.finish()
        assert "is stopped and is replaced" in cluster.text()
    finally:
        cluster.close()
    assert cluster.digests() == {undisturbed}
