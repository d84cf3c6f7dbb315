"""A compiled job of real workers: one is killed, another compiles in its place; the bits of an undisturbed run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cluster import Cluster

from log_lines import read_lines

SCRIPT = Path(__file__).parent / "compiled_script.py"
NUM_STEPS, HELD = 8, 3
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.soak,
            pytest.mark.skipif(
                shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
            ),
        ],
    ),
]


def committed_by(cluster: Cluster, worker: str) -> list[int]:
    (log,) = (cluster.directory / "logs").glob(f"audit-*{worker}*.jsonl")
    return [record["step"] for record in read_lines(log) if record["kind"] == "commit"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_worker_and_one_that_compiles_in_its_place_leave_the_bits(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    alone = Cluster(tmp_path / "alone", 1, NUM_STEPS, script=SCRIPT, script_flag=backend)
    try:
        alone.finish(250.0)
    finally:
        alone.close()
    cluster = Cluster(tmp_path / "job", 3, NUM_STEPS, hold=HELD, script=SCRIPT, script_flag=backend)
    try:
        cluster.wait_workers(3)
        cluster.wait_step(HELD)
        first = set(cluster.newest_round())
        victim = cluster.newest_round()[1]
        cluster.signal(victim)
        cluster.wait_until(lambda: len(set(cluster.newest_round()) - {victim}) == 3, "a replacement in its seat")
        (newcomer,) = set(cluster.newest_round()) - first
        cluster.release()
        assert cluster.finish(250.0).num_steps == NUM_STEPS
        assert committed_by(cluster, newcomer)[-1] == NUM_STEPS - 1, "it had its share of the work"
        assert len(list(cluster.directory.glob("digest-*"))) == 3
        assert cluster.digests() == alone.digests()
        for path in cluster.directory.glob("graphs-*"):
            assert path.read_text() == "1 1", f"{path.name}: one graph, before it had a seat"
    finally:
        cluster.close()
