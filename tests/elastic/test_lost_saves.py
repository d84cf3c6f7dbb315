"""Under a launcher: saves that cannot be read or written end the job with a reason, not a restart from nothing."""

from __future__ import annotations

import resource
import signal

from cluster import Cluster
from elastic_training import make_job, train

from phalanx.elastic import RunOptions, Saves
from phalanx.elastic.checkpoint._save_folder import find_save


def test_a_job_whose_saves_are_damaged_is_not_restarted_and_does_not_begin_anew(tmp_path):
    saves = Saves(directory=tmp_path / "saves", every=5)
    train(make_job(saves=saves, run=RunOptions(progress=False)), max_steps=10, wait_for_saves=True)
    for path in (tmp_path / "saves").glob("*/state.json"):
        path.write_text("torn")
    cluster = Cluster(tmp_path, 2, script_flag="--save", max_restarts="3")
    try:
        assert cluster.process.wait(150) == 1, cluster.text()[-4000:]
        text = cluster.text()
        assert "NoReadableSave: there are saves in" in text
        assert "Restore one of them from a copy, or, to begin anew, move them away" in text
        assert "it stopped the job" in text
        assert "generation 1" not in text
        assert cluster.step() == 0, "nothing was committed"
        left = sorted(path.name for path in (tmp_path / "saves").iterdir())
        assert left == ["last-good", "owner", "step-000000000005", "step-000000000010"], "nothing was removed"
    finally:
        cluster.close()


def test_when_all_leave_and_the_disk_is_full_the_job_has_failed(tmp_path):
    cluster = Cluster(tmp_path, 2, hold=7, script_flag="--save", max_restarts="3")
    try:
        cluster.wait_step(7)
        cluster.wait_until(lambda: cluster.events("saved"), "the save of step 5")
        pids = cluster.pids()
        for pid in pids.values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        for worker in pids:
            cluster.signal(worker, signal.SIGTERM)
        assert cluster.process.wait(150) == 1, cluster.text()[-4000:]
        assert "it stopped the job" in cluster.text(), "although no error file could be written"
        assert "NotSaved: all workers were told to leave, and the state at step" in cluster.text()
        assert find_save(tmp_path / "saves")[0].step == 5
        assert not list((tmp_path / "saves").glob(".partial*"))
    finally:
        cluster.close()
