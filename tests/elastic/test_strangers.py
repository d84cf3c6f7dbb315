"""A stranger writes garbage over every key of a running job's store: it ends with the same bits and code 0."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster
from strangers import Stranger
from tests.comm.stores.conftest import etcd_cluster

from phalanx.comm.stores import connect

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
    attack(Cluster(tmp_path, 2, hold=30), undisturbed, least=60)


@pytest.mark.soak
def test_much_garbage_in_a_tcp_store(tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    attack(Cluster(tmp_path, 2, hold=30), undisturbed, least=300)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["file", "etcd"])
def test_garbage_in_a_store_that_outlives_agents(
    tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    with ExitStack() as stack:
        endpoint = str(tmp_path / "store")
        if backend == "etcd":
            (tmp_path / "etcd").mkdir()
            (server,) = stack.enter_context(etcd_cluster(1, tmp_path / "etcd"))
            endpoint = server.url.removeprefix("etcd://")
        options = {"rdzv_backend": backend, "rdzv_endpoint": endpoint, "rdzv_id": "garbage"}
        attack(Cluster(tmp_path / "job", 2, hold=30, **options), undisturbed, least=300)


@pytest.mark.soak
def test_deleted_keys_are_written_again_or_end_in_a_clear_error(
    tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key of the job's namespace, one by one: the same bits and code 0, or a code that says that it failed."""
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    cluster = Cluster(tmp_path, 2, hold=30)
    try:
        cluster.wait_step(2)
        with connect((tmp_path / "store").read_text()) as store:
            for key in store.items():
                store.delete(key)
                cluster.wait_until(lambda: len(cluster.pids()) >= 1, "workers", 60)
            cluster.release()
            code = cluster.process.wait(200)
        if code == 0:
            assert cluster.digests() == {undisturbed}
        else:
            assert "Error" in cluster.text()
        assert "Exception in thread" not in cluster.text()
    finally:
        cluster.close()
