"""Checks and guards on real processes: who has wrong bits is parted with, a loss that explodes is undone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import NUM_STEPS, SCRIPT, Cluster, Node
from elastic_training import NUM_SLOTS, SEED

from phalanx.elastic import VerifySlots
from phalanx.elastic._verify_slots import plan_check
from phalanx.elastic.reduce._deal import even_deal, ranges_of
from phalanx.elastic.reduce._waves import even_waves

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


@pytest.fixture
def three_nodes(start: Callable[..., Cluster]) -> Callable[..., tuple[Cluster, str]]:
    """A job with a worker on each of three nodes, every step checked; with it the endpoint of its rendezvous."""

    def begin(flags=""):
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        host = Node(flags=("--rdzv-conf=is_host=true",))
        other = Node(flags=("--rdzv-conf=is_host=false",))
        cluster = start(
            1, nodes=(host, other, other), nnodes="1:3", rdzv_backend="c10d", rdzv_id="liar", rdzv_endpoint=endpoint,
            script_flag=f"--verify --still {flags}",
        )  # fmt: skip
        cluster.wait_workers(3)
        cluster.wait_step(10)
        return cluster, endpoint

    return begin


def end_without(cluster: Cluster, liar: str, kind: str) -> dict:
    """Wait for the end of the job without a liar; everything that must hold then, and the event that names it."""
    (event,) = cluster.events("wrong_bits")
    assert (event["what"], event["culprit"]) == (kind, liar)
    last = f"phalanx.errors.WrongBits: step {event['step']}: worker {liar} "
    verdict = cluster.finish(tracebacks=[line for line in cluster.text().splitlines() if last in line])
    assert verdict.num_steps == NUM_STEPS
    assert liar not in cluster.newest_round()
    assert len(cluster.newest_round()) == 2
    return event


def test_a_node_whose_weights_are_wrong_is_left_out_and_the_status_names_it(three_nodes, undisturbed):
    cluster, endpoint = three_nodes()
    liar = cluster.newest_round()[-1]
    cluster.lie(liar, f"{HOLD + 2} weights")
    cluster.hold(HOLD + 10)
    cluster.wait_until(lambda: "this node is left out" in cluster.text(), "the liar's departure")
    cluster.wait_step(HOLD + 5)
    said = subprocess.run(
        [sys.executable, "-m", "phalanx", "status", f"--rdzv-endpoint={endpoint}", "--rdzv-id=liar"],
        capture_output=True, text=True, timeout=100, env={**os.environ, "TMPDIR": str(cluster.scratch)},
    )  # fmt: skip
    cluster.release()
    event = end_without(cluster, liar, "weights")
    assert (event["step"], event["parameter"], event["element"]) == (HOLD + 2, "extra", 1)
    assert f"worker {liar} has other weights than most: extra differs at " in cluster.text()
    assert cluster.digests() == {undisturbed}
    assert said.returncode == 0, said.stderr
    assert "left out: workers failed or lied there" in said.stdout, said.stdout
    assert "2 workers on 2 node(s)" in said.stdout, said.stdout
    assert " slots  compute " in said.stdout, said.stdout


@pytest.mark.parametrize("flags", ["", pytest.param("--copies=2", marks=pytest.mark.soak)])
def test_a_node_that_computes_a_slot_wrongly_is_left_out(three_nodes, undisturbed, flags):
    cluster, _ = three_nodes(flags)
    workers = cluster.newest_round()
    slots = even_waves(NUM_SLOTS, 3) if flags else ranges_of(even_deal(NUM_SLOTS, 3))
    of_rank = [slots.slots_of(rank) for rank in range(3)] if flags else slots
    step, check = next(
        (step, check)
        for step in range(HOLD + 2, NUM_STEPS)
        if (check := plan_check(VerifySlots(every=1), SEED, step, of_rank)).first == 2
    )
    cluster.lie(workers[2], f"{step} gradient {check.slot}")
    cluster.hold(step + 5)
    cluster.wait_until(lambda: "this node is left out" in cluster.text(), "the liar's departure")
    cluster.release()
    event = end_without(cluster, workers[2], "slot")
    assert (event["step"], event["slot"]) == (step, check.slot)
    first = ("inner.5.bias", "inner.5.weight") if flags else ("extra", "inner.0.weight")  # delivered, or of the model
    assert event["parameter"] in first
    assert event["element"] >= 0
    assert len(set(event["values"])) == (0 if flags else 2)
    assert f"worker {workers[2]} computed slot {check.slot} wrongly: {event['parameter']} differs" in cluster.text()
    assert cluster.digests() == {undisturbed}


@pytest.mark.parametrize("flags", [pytest.param("", marks=pytest.mark.soak), "--copies=2"])
def test_a_node_that_receives_a_message_wrongly_is_left_out(three_nodes, undisturbed, flags):
    cluster, _ = three_nodes(flags)
    workers = cluster.newest_round()
    cluster.lie(workers[1], f"{HOLD + 2} message")
    cluster.hold(HOLD + 10)
    cluster.wait_until(lambda: "this node is left out" in cluster.text(), "the liar's departure")
    cluster.release()
    event = end_without(cluster, workers[1], "message")
    assert (event["step"], "slot" in event) == (HOLD + 2, False)
    assert f"worker {workers[1]} received something other than what {workers[0]} sent" in cluster.text()
    assert cluster.digests() == {undisturbed}


@pytest.mark.parametrize("sharded", [[], pytest.param(["--copies=2"], marks=pytest.mark.soak)])
def test_a_job_of_processes_goes_back_to_the_last_good_save_as_one_process_does(start, tmp_path, sharded):
    flags = ["--save=5", f"--spike={HOLD + 2}"]
    alone = tmp_path / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, str(SCRIPT), str(alone), str(NUM_STEPS), "0", *flags], check=True, timeout=300)
    cluster = start(2, script_flag=" ".join([*flags, *sharded]))
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
