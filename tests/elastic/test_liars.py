"""Checks and guards on real processes: who has wrong weights is parted with, a loss that explodes is undone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import NUM_STEPS, SCRIPT, Cluster, Node

pytestmark = pytest.mark.timeout(400)

HOLD = 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started = []

    def begin(num_workers, **options):
        started.append(Cluster(tmp_path / f"job{len(started)}", num_workers, NUM_STEPS, hold=HOLD, **options))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def test_a_node_whose_weights_are_wrong_is_left_out_and_the_status_names_it(start, undisturbed):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
    host = Node(flags=("--rdzv-conf=is_host=true",))
    other = Node(flags=("--rdzv-conf=is_host=false",))
    cluster = start(
        1, nodes=(host, other, other), nnodes="1:3", rdzv_backend="c10d", rdzv_id="liar", rdzv_endpoint=endpoint,
        script_flag="--verify",
    )  # fmt: skip
    cluster.wait_workers(3)
    cluster.wait_step(10)
    liar = cluster.newest_round()[-1]
    (cluster.directory / f"lie-{liar}").write_text(str(HOLD + 2))
    cluster.hold(HOLD + 10)
    cluster.wait_until(lambda: "this node is left out" in cluster.text(), "the liar's departure")
    cluster.wait_step(HOLD + 5)
    said = subprocess.run(
        [sys.executable, "-m", "phalanx", "status", f"--rdzv-endpoint={endpoint}", "--rdzv-id=liar"],
        capture_output=True, text=True, timeout=100, env={**os.environ, "TMPDIR": str(cluster.scratch)},
    )  # fmt: skip
    cluster.release()
    (event,) = cluster.events("wrong_bits")
    assert (event["step"], event["what"], event["culprit"]) == (HOLD + 2, "weights", liar)
    assert (event["parameter"], event["element"]) == ("extra", 1)
    last = f"phalanx.errors.WrongBits: step {HOLD + 2}: worker {liar} has other weights than most: extra differs at "
    verdict = cluster.finish(tracebacks=[line for line in cluster.text().splitlines() if last in line])
    assert verdict.num_steps == NUM_STEPS
    assert liar not in cluster.newest_round()
    assert len(cluster.newest_round()) == 2
    assert cluster.digests() == {undisturbed}
    assert said.returncode == 0, said.stderr
    assert "left out: workers failed or lied there" in said.stdout, said.stdout
    assert "2 workers on 2 node(s)" in said.stdout, said.stdout
    assert " slots  compute " in said.stdout, said.stdout


def test_a_job_of_processes_goes_back_to_the_last_good_save_as_one_process_does(start, tmp_path):
    flags = ["--save=5", f"--spike={HOLD + 2}"]
    alone = tmp_path / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, str(SCRIPT), str(alone), str(NUM_STEPS), "0", *flags], check=True, timeout=300)
    cluster = start(2, script_flag=" ".join(flags))
    cluster.wait_step(10)
    _, second = cluster.pids()
    cluster.signal(second)
    cluster.wait_workers(2)
    cluster.release()
    verdict = cluster.finish()
    backs = cluster.events("rolled_back")
    assert {(event["step"], event["to"]) for event in backs} == {(HOLD + 2, 15)}
    assert sorted(verdict.left_out) == list(range(15, HOLD + 3))
    assert cluster.digests() == {(alone / "digest-rank0").read_text()}
