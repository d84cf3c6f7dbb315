"""Tensor parallel below a job: workers of all lanes compute slots together, and any of them may be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensor_training
import torch
from cluster import Cluster
from scripted_world import Die, Rows
from sharded_training import sha
from sharded_world import Fault, ShardedWorld, Told
from tensor_training import build, distribute, make_job, on_ranks, score, train, weights
from torch import nn
from torch.nn import functional as F

from phalanx.comm import init_device_mesh, simulate
from phalanx.elastic import Job, NonFinite, RunOptions, Saves, StepsLost, WorkersDiffer, job_mesh
from phalanx.elastic._job_mesh import mesh_at
from phalanx.elastic.audit import check_directory
from phalanx.errors import PeerLost
from phalanx.fsdp import fully_shard
from phalanx.fsdp.context import context_parallel
from phalanx.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.timeout(600)

STEP = 3
SCRIPT = Path(__file__).parent / "tensor_script.py"


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], str]:
    """What one group of two computes."""
    (told, whole, digest), _ = simulate(2).run(on_ranks, 2, 1)
    return told, f"{sha(whole)} {digest}"


def test_any_number_of_workers_gives_one_result_close_to_that_without_tensor_parallelism(undisturbed):
    for size, copies in ((3, 2), (4, 2)):  # with three, one finds no group and holds cells only
        for told, whole, digest in simulate(size).run(on_ranks, 2, copies):
            assert (told, f"{sha(whole)} {digest}") == undisturbed, f"{size} workers, {copies} copies"
    plain = make_job(None, run=RunOptions(progress=False, threads=1))
    assert train(plain)[-1][1:3] == pytest.approx(undisturbed[0][-1][1:3], rel=1e-5)
    for name, value in plain.full_state_dict().items():
        assert torch.allclose(whole[name], value, rtol=1e-5, atol=1e-6), name


def test_dropout_of_dtensors_belongs_to_the_slot(monkeypatch):
    class Dropping(tensor_training.Block):
        def forward(self, x):
            return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.3))

    monkeypatch.setattr(tensor_training, "Block", Dropping)
    monkeypatch.setitem(tensor_training.PLAN, "up", lambda: ColwiseParallel(use_local_output=False))

    def main(group):
        return str(train(make_job(job_mesh(tp=2), group=group, copies=1), max_steps=2))

    found = {told for size in (2, 4) for told in simulate(size).run(main)}
    assert len(found) == 1, "whichever worker computes it, and whatever it has computed before"


def spoil(job):
    """Go on with a slot whose loss is nan."""
    for step in job.steps(max_steps=3):
        for micro in step:
            loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
            micro.backward(loss * float("nan") if micro.slot == 1 else loss)
        step.commit()


def test_all_lanes_evaluate_alike_and_stop_for_what_is_not_finite():
    def main(group):
        job = make_job(job_mesh(tp=2), group=group, copies=1)
        train(job, max_steps=1)
        found = score(job)
        with pytest.raises(NonFinite, match="step 1"):
            spoil(job)
        return found

    (alone, _), several = simulate(2).run(main), simulate(5).run(main)
    assert set(several) == {alone}


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_groups_of_any_degree_on_any_number_of_workers_and_copies(degree):
    found = {
        (str(told), sha(whole), digest)
        for size in range(degree, 9)
        for copies in (1, 2, 3, "all")
        for told, whole, digest in simulate(size, timeout=1000).run(on_ranks, degree, copies)
    }
    assert len(found) == 1


# ---- losses


class TensorWorld(ShardedWorld):
    """Workers whose names tell their lanes: a and c are in the first, b and d in the second."""

    def train(self, on_step: Any, after: Any, on_commit: Any) -> object:
        lane = "abcdef".index(self._local.coordinator.worker_id) % 2
        run = RunOptions(progress=False, verify=True, log_dir=self.directory, hold=self.hold, threads=1)
        job = make_job(mesh_at(lane, 2), run=run, copies=self.copies, saves=self.saves)
        self.prepare(job.model)
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


@pytest.mark.parametrize("at", [5, 25])
def test_a_lost_member_costs_its_group_the_slots_and_the_job_the_step(make_world, undisturbed, at):
    kill_at(make_world, undisturbed, at)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", ["a", "d"])
def test_a_worker_dies_at_every_collective_of_a_step(make_world, undisturbed, victim):
    whole = make_world()
    whole.run("abcd")
    for at in range(whole.told[victim].collectives[STEP]):
        kill_at(make_world, undisturbed, at, victim=victim)


def test_a_loss_beyond_the_copies_takes_all_lanes_back_to_the_last_save(make_world, undisturbed, capfd):
    """The second lane has lost cells; the first has all of its own, and goes back too."""
    world = make_world(copies=1, faults=(Fault("b", 7, 9, ("a", "c", "d")),))
    world.saves = Saves(directory=world.directory / "saves", every=2)

    def on_commit(job, step, outcome):
        job.saving.wait_idle()

    results = world.run("abcd", on_commit)
    assert isinstance(results["b"], Die)
    for worker in "acd":
        assert results[worker] == undisturbed[1], worker
        assert [number for number, how in world.told[worker].outcomes if how == "applied"] == [*range(7), 6, 7]
    told = capfd.readouterr().err
    assert "cells were lost with their last holders at step 7: the job goes back from step 7 to step 6" in told
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], world.num_steps)


def test_members_of_two_groups_are_lost_and_those_who_are_left_form_one(make_world, undisturbed):
    both = (Fault("b", STEP, 9, ("a", "d")), Fault("c", STEP, 9, ("a", "d")))
    world = make_world(faults=both)
    results = world.run("abcd")
    assert {worker: results[worker] for worker in "ad"} == dict.fromkeys("ad", undisturbed[1])


def test_who_missed_the_commit_point_that_another_lane_passed_rolls_forward(make_world, undisturbed):
    """One of the second lane has applied the step and dies; the first lane has not heard that all were prepared."""
    world = make_world()

    def on_commit(job, step, outcome):
        if step.number == STEP and job.worker_id == "d":
            world.break_(0, "d")
            world.agree(1, *"abc")
            raise Die

    def on_step(job, step):
        if step.number == STEP and job.generation == 0 and job.worker_id in "ac":
            join = job.sharding.tensor_groups.join_verdicts

            def miss(everyone, mine):
                join(everyone, mine)
                job.sharding.tensor_groups.join_verdicts = join
                raise PeerLost("told to miss it", generation=0)

            job.sharding.tensor_groups.join_verdicts = miss

    world.agree(0, *"abcd")
    for worker in "abcd":
        world.start(worker, on_commit=on_commit, on_step=on_step)
    results = world.join()
    for worker in "abc":
        assert results[worker] == undisturbed[1], (worker, results[worker])
    assert (STEP, "adopted") in world.told["a"].outcomes
    assert (STEP, "adopted") in world.told["c"].outcomes


def test_a_replacement_makes_the_group_whole_again(make_world, undisturbed):
    world = make_world(faults=(Fault("b", 1, 9, ("a", "f", "c", "d")),))

    def on_step(job, step):
        if step.number == 3 and job.worker_id == "a":
            assert len(job.sharding.tensor_groups.lanes.groups) == 1
            world.start("f", 1)
            world.await_newcomer()
        if step.number == 6 and job.worker_id == "a":
            assert len(job.sharding.tensor_groups.lanes.groups) == 2

    world.agree(0, *"abcd")
    with world.watching():
        for worker in "abcd":
            world.start(worker, on_step=on_step)
        results = world.join()
    for worker in "acdf":
        assert results[worker] == undisturbed[1], (worker, results[worker])


def test_a_polite_leave_hands_its_cells_over_within_its_lane(make_world, undisturbed):
    world = make_world(copies=1)
    world.agree(0, *"abcd")

    def leave(job, step):
        if step.number == STEP:
            job.regrouping.leave.requested = True

    for worker in "abcd":
        world.start(worker, on_step=leave if worker == "b" else lambda job, step: None)
    world.threads[1].join(200)
    assert isinstance(world.results["b"], SystemExit)
    world.break_(0, "b")
    world.agree(1, *"acd")
    results = world.join()
    for worker in "acd":
        assert results[worker] == undisturbed[1], (worker, results[worker])
        assert not any(outcome == "dropped" for _, outcome in world.told[worker].outcomes)


def test_a_lane_that_is_lost_with_its_last_worker_stops_the_job(make_world):
    both = (Fault("b", STEP, 9, ("a", "c")), Fault("d", STEP, 9, ("a", "c")))
    results = make_world(faults=both).run("abcd")
    for worker in "ac":
        assert isinstance(results[worker], StepsLost)
        assert "the job has no saves" in str(results[worker])


def test_real_workers_are_killed_and_replaced(tmp_path, undisturbed):
    cluster = Cluster(tmp_path / "job", 4, num_steps=8, hold=3, script=SCRIPT)
    try:
        cluster.wait_workers(4)
        cluster.wait_step(3)
        cluster.signal(cluster.newest_round()[1])
        cluster.wait_until(lambda: len(cluster.events("lost")) > 0, "a loss")
        cluster.wait_workers(4)
        cluster.release()
        verdict = cluster.finish()
        assert verdict.num_steps == 8
        assert cluster.digests() == {undisturbed[1]}
    finally:
        cluster.close()


# ---- what is refused


def alone(lane: int = 0) -> Any:
    return mesh_at(lane, 2)


def refuses(message: str, **keywords: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make_job(alone(), run=RunOptions(progress=False), **keywords)


def test_what_is_not_built_yet_is_refused():
    refuses(r"state= with what is laid out like parameters \(others.ema.0.norm.weight", state={"ema": build()})


def test_optimizers_of_whole_matrices_are_refused():
    model = distribute(build(), alone())
    muon = torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.02)
    with pytest.raises(ValueError, match="an optimizer that needs whole matrices"):
        Job(model, muon, Rows(), num_slots=2, slot_batch_size=2)


def job_of(model: nn.Module) -> Job:
    return Job(model, torch.optim.SGD(model.parameters()), Rows(), num_slots=2, slot_batch_size=2)


def test_distributed_models_that_a_job_cannot_follow_are_refused():
    model = parallelize_module(nn.Linear(8, 4), alone()["tp"], ColwiseParallel(), src_data_rank=None)
    with pytest.raises(ValueError, match="would take each worker's shard for the whole"):
        job_of(model)
    uneven = parallelize_module(nn.Linear(8, 5), (mesh := alone())["tp"], ColwiseParallel(), src_data_rank=None)
    with pytest.raises(ValueError, match=r"shape \(5, 8\).* 2 workers do not divide evenly"):
        job_of(fully_shard(uneven, mesh=mesh["dp"]))
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    fully_shard(mixed[0], mesh=alone()["dp"])
    with pytest.raises(ValueError, match="on different meshes"):
        job_of(fully_shard(mixed))


def test_a_mesh_of_other_groups_is_refused():
    def main(group):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="job_mesh"):
            job_of(distribute(build(), mesh))
        return True

    assert all(simulate(2).run(main))


def test_too_few_workers_and_different_initial_values_are_told():
    def few(group):
        mesh = mesh_at(0, 2)
        with pytest.raises(ValueError, match="none is at place 1 of 2"):
            train(make_job(mesh, group=group))
        return True

    def differ(group):
        with pytest.raises(WorkersDiffer, match=r"differ in 0.norm.weight|differ in .*: every worker must build"):
            train(make_job(job_mesh(tp=2), group=group, seed=group.rank))
        return True

    assert all(simulate(2).run(few))
    assert all(simulate(2).run(differ))


def test_contexts_are_refused_inside_a_step():
    def main(group):
        mesh = init_device_mesh("cpu", (2,))
        job = job_of(build())
        micro = next(iter(next(job.steps(max_steps=1))))
        x = micro.inputs[:, None].expand(-1, 8, -1).contiguous()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            loss = job.model(x).mean()
            with pytest.raises(ValueError, match="inside context_parallel"):
                micro.backward(loss)
        return True

    assert all(simulate(2).run(main))


def test_a_whole_tensor_cannot_be_written_to_a_shard():
    def main(group):
        job = make_job(job_mesh(tp=2), group=group)
        for step in job.steps(max_steps=1):
            for micro in step:
                micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            step.commit()
        with torch.no_grad():
            job.model[0].up.weight.mul_(1.0)
            with pytest.raises(RuntimeError, match="a tensor parallel shard of it"):
                job.model[0].up.weight.copy_(torch.zeros(48, 8))
        return True

    assert all(simulate(2).run(main))
