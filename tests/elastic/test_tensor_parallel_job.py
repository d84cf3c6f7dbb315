"""Tensor parallel below a job: workers of all lanes compute slots together, and any of them may be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_world import Die
from sharded_training import sha
from sharded_world import Fault, ShardedWorld, Told
from tensor_training import build, distribute, make_job, on_ranks, train, weights
from torch import nn
from torch.nn import functional as F

from phalanx.comm import simulate
from phalanx.elastic import RunOptions, Saves, StepsLost, WorkersDiffer, job_mesh
from phalanx.elastic._job_mesh import mesh_at
from phalanx.elastic.audit import check_directory
from phalanx.fsdp import fully_shard
from phalanx.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.timeout(600)

STEP = 3


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], str]:
    """What one team of two computes."""
    (told, whole, digest), _ = simulate(2).run(on_ranks, 2, 1)
    return told, f"{sha(whole)} {digest}"


def test_any_number_of_workers_gives_one_result_close_to_that_without_tensor_parallelism(undisturbed):
    for size, copies in ((3, 2), (4, 2)):  # with three, one finds no team and holds cells only
        for told, whole, digest in simulate(size).run(on_ranks, 2, copies):
            assert (told, f"{sha(whole)} {digest}") == undisturbed, f"{size} workers, {copies} copies"
    plain = make_job(None, run=RunOptions(progress=False, threads=1))
    assert train(plain)[-1][1:3] == pytest.approx(undisturbed[0][-1][1:3], rel=1e-5)
    for name, value in plain.full_state_dict().items():
        assert torch.allclose(whole[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_teams_of_any_degree_on_any_number_of_workers_and_copies(degree):
    found = {
        (str(told), sha(whole), digest)
        for size in range(degree, 9)
        for copies in (1, 2, 3, "all")
        for told, whole, digest in simulate(size).run(on_ranks, degree, copies)
    }
    assert len(found) == 1


# ---- losses


class TensorWorld(ShardedWorld):
    """Workers whose names tell their lanes: a and c are in the first, b and d in the second."""

    def train(self, on_step: Any, after: Any, on_commit: Any) -> object:
        lane = "abcdef".index(self._local.coordinator.worker_id) % 2
        run = RunOptions(progress=False, verify=True, log_dir=self.directory, hold=self.hold, threads=1)
        job = make_job(mesh_at(lane, 2), run=run, copies=self.copies)
        told = self.told[job.worker_id] = Told()
        self.here.job, self.here.step, self.here.told = job, -1, told
        try:
            for step in job.steps(max_steps=self.num_steps):
                self.here.step = step.number
                on_step(job, step)
                for micro in step:
                    micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
                outcome = step.commit(max_grad_norm=self.clip)
                told.outcomes.append((step.number, outcome.value))
                if outcome:
                    told.steps.append((step.number, step.loss, step.grad_norm, step.num_samples))
                on_commit(job, step, outcome)
            self.here.step = self.num_steps
            return weights(job)
        finally:
            self.here.job = None
            job.close()


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TensorWorld]:
    made = []

    def make(**settings):
        made.append(TensorWorld(tmp_path / f"world{len(made)}", monkeypatch))
        made[-1].directory.mkdir()
        for name, value in settings.items():
            setattr(made[-1], name, value)
        return made[-1]

    return make


def kill_at(make_world, undisturbed, at, workers="abcd", victim="b"):
    survivors = tuple(worker for worker in workers if worker != victim)
    world = make_world(faults=(Fault(victim, STEP, at, survivors),))
    results = world.run(workers)
    assert world.faults[0].is_done, f"worker {victim} issues no collective {at} in step {STEP}"
    assert isinstance(results[victim], Die)
    for worker in survivors:
        assert results[worker] == undisturbed[1], (worker, results[worker])
        assert world.told[worker].steps == undisturbed[0]
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], world.num_steps)
    return world


@pytest.mark.parametrize("at", [5, 40])
def test_a_lost_member_costs_its_team_the_slots_and_the_job_the_step(make_world, undisturbed, at):
    kill_at(make_world, undisturbed, at)
