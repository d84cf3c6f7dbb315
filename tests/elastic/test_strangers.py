"""A stranger writes garbage over every key of a job's store while it runs: the job ends with the same bits and code 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from strangers import Stranger
from tests.comm.stores.conftest import etcd_cluster

pytestmark = pytest.mark.timeout(280)


def attack(cluster: Cluster, undisturbed: str, *, least: int) -> None:
    """Garbage from the first step on; a worker dies and another is added meanwhile."""
    try:
        cluster.wait_step(2)
        stranger = Stranger((cluster.directory / "store").read_text(), pause=0.03)
        try:
            cluster.wait_until(lambda: stranger.num_writes >= least // 2, "half of the garbage")
            cluster.signal(next(iter(cluster.pids())))
            cluster.wait_until(lambda: stranger.num_writes >= least, "all of the garbage")
            cluster.release()
            verdict = cluster.finish()
        finally:
            stranger.stop()
        assert verdict.num_steps == int(undisturbed.split()[0])
        assert cluster.digests() == {undisturbed}
        text = cluster.text()
        assert "refused a" in text
        assert "Exception in thread" not in text, text
        # A stranger's wish is nobody's: rounds change because of the death, and where a record had to be written again.
        assert len(cluster.events("regrouped")) < 60
        assert any("rdzv" in kind for kind in stranger.kinds), stranger.kinds
        assert any("elastic" in kind or "progress" in kind for kind in stranger.kinds), stranger.kinds
    finally:
        cluster.close()


def test_garbage_in_a_tcp_store(tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    attack(Cluster(tmp_path, 2, hold=30), undisturbed, least=300)
