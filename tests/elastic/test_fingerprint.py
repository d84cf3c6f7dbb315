"""The weights of all workers are compared where the loop says, without gathering them; one value for any layout."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sharded_training
import torch
from cluster import NUM_STEPS, SCRIPT, Cluster
from scripted_world import Die, World
from torch.nn import functional as F

from log_lines import read_lines
from phalanx.comm import observe, simulate
from phalanx.elastic import WorkersDiffer
from phalanx.elastic._fingerprint import agreed_nodes, compare_roots
from phalanx.errors import RankFailed


def flip(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the third element."""
    tensor.detach().reshape(-1)[2:3].view(torch.int32).bitwise_xor_(1)


def train(group, *, sharded=True, copies=2, hurt=None):
    """Three steps; the fingerprint after the second, and the largest message while it was taken."""
    job = sharded_training.make_job(group=group, sharded=sharded, copies=copies)
    sizes = []
    for step in job.steps(max_steps=3):
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        step.commit()
        if step.number == 1:
            if hurt is not None:
                hurt(job)
            with observe(lambda event: sizes.append(event.nbytes)):
                found = job.fingerprint()
    return found, max(sizes, default=0)


def test_one_fingerprint_on_any_number_of_workers_sharded_or_not():
    expected, _ = train(None, sharded=False)
    assert (expected.step, expected.num_workers) == (2, 1)
    assert {"first.weight", "never", "frozen", "seen", "drift"} <= set(expected.tensors)
    for size, sharded, copies in ((3, False, None), (3, True, 2), (4, True, 1)):
        for found, _ in simulate(size).run(train, sharded=sharded, copies=copies):
            assert (found.digest, found.tensors) == (expected.digest, expected.tensors)
            assert found.num_workers == size
            assert found.differs_in(expected) == []


def test_other_weights_have_another_fingerprint_and_the_tensor_is_named():
    expected, _ = train(None, sharded=False)
    other, _ = train(None, sharded=False, hurt=lambda job: flip(job.model.first.weight))
    assert other.digest != expected.digest
    assert other.differs_in(expected) == ["first.weight"]


def test_a_worker_with_other_weights_is_named():
    def hurt(job):
        if job.rank == 1:
            flip(job.model.middle[0].weight)

    with pytest.raises(
        RankFailed, match=r"after step 2, worker \S*1\S* has other bits than .* in middle.0.weight$"
    ) as e:
        simulate(3).run(train, sharded=False, hurt=hurt)
    assert isinstance(e.value.__cause__, WorkersDiffer)


def test_a_mirror_with_other_bits_than_its_owner_is_named():
    def hurt(job):
        if job.rank == 2:
            flip(next(p.tensor for p in job.sharding.store.pieces if job.sharding.name_of(p.key) == "first.weight"))

    with pytest.raises(RankFailed, match=r"after step 2, workers .* both hold blocks \d+ to \d+ of first.weight"):
        simulate(3).run(train, hurt=hurt)


@pytest.mark.fast
def test_who_differs_is_the_minority_and_holders_are_compared_by_ranges():
    one, other = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
    compare_roots(5, "xyz", [one, one, one])
    with pytest.raises(WorkersDiffer, match="after step 5, workers x, z have other bits than y, w, v in b"):
        compare_roots(5, "xyzwv", [other, one, {**other, "b": "4"}, one, one])
    with pytest.raises(WorkersDiffer, match="workers x and z, which both hold blocks 0 to 2 of w"):
        agreed_nodes(5, "xyz", [{"w": [(0, 2, "00")]}, {"w": [(2, 4, "01")]}, {"w": [(0, 2, "02")]}])


def test_a_worker_that_is_lost_meanwhile_costs_the_comparison_and_nothing_else(tmp_path, monkeypatch):
    found = {}

    def undisturbed(directory):
        world = World(directory, monkeypatch)
        world.agree(0, "x")
        world.start("x")
        return world.join()["x"]

    expected = undisturbed(tmp_path / "one")
    world = World(tmp_path / "three", monkeypatch)

    def on_commit(job, step, outcome):
        if step.number in (4, 9) and outcome:
            if job.worker_id == "b" and step.number == 4:
                world.break_(0, "b")
                world.agree(1, "a", "c")
                raise Die
            found[job.worker_id, step.number] = job.fingerprint()

    world.agree(0, "a", "b", "c")
    for worker in "abc":
        world.start(worker, on_commit=on_commit)
    results = world.join()
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"] == expected
    assert found["a", 4] is found["c", 4] is None
    assert found["a", 9] == found["c", 9]
    assert found["a", 9].num_workers == 2
    told = [e for p in (tmp_path / "three").glob("events-*") for e in read_lines(p) if e["event"] == "fingerprint"]
    assert [(e["step"], e["digest"], e["workers"]) for e in told] == [(10, found["a", 9].digest, 2)]


def test_only_digests_travel():
    _, largest = simulate(3).run(train)[0]
    model = sharded_training.build(sharded=False)
    assert 0 < largest < sum(p.numel() * p.element_size() for p in model.parameters()) / 2


@pytest.mark.timeout(400)
def test_a_sharded_job_of_processes_has_the_fingerprints_of_one_process_over_a_loss(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    subprocess.run(
        [sys.executable, str(SCRIPT), str(alone), str(NUM_STEPS), "0", "--fingerprint=20"], check=True, timeout=300
    )
    cluster = Cluster(tmp_path / "job", 3, hold=30, script_flag="--fingerprint=20 --copies=2")
    try:
        cluster.wait_workers(3)
        cluster.wait_step(30)
        killed = cluster.newest_round()[1]
        cluster.signal(killed)
        cluster.wait_until(lambda: killed not in cluster.newest_round(), "a round without it")
        cluster.wait_workers(3)
        cluster.release()
        cluster.finish()
    finally:
        cluster.close()
    for step in (20, 40, 60):
        one, three = ((directory / f"fingerprint-{step}").read_text() for directory in (alone, tmp_path / "job"))
        assert three == f"{one.removesuffix(' of 1')} of 3"
    assert cluster.digests() == {(alone / "digest-rank0").read_text()}
    assert len({(alone / f"fingerprint-{step}").read_text() for step in (20, 40, 60)}) == 3
