"""Guards of sharded jobs: updates are left out and weights go back as in the unsharded job, whoever is lost then."""

from __future__ import annotations

import contextlib

import pytest
import torch
from scripted_world import Die
from sharded_training import make_job, weights
from sharded_world import COMMIT_POINT, ShardedWorld
from torch.nn import functional as F

from phalanx.comm import observe, simulate
from phalanx.comm.faults import lose_result_at, play
from phalanx.elastic import Guard, LossSpike, NonFinite, Outcome, RunOptions, Saves
from phalanx.elastic._sharded_guarding import ShardedGuarding
from phalanx.elastic.audit import check_directory
from phalanx.errors import PeerLost

pytestmark = pytest.mark.timeout(600)
NAN = float("nan")
SKIPS = Guard(nonfinite="skip")


class Steep(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def run(group, sharded, guard, spoiled, max_steps, saves=None, clip=0.5):
    """Train with losses that are ``spoiled``: by step, added to and multiplied with."""
    run = RunOptions(progress=False, group=group, verify=True, threads=1)
    job = make_job(sharded=sharded, copies=2, guard=guard, saves=saves, run=run, is_random=False)
    outcomes = []
    for step in job.steps(max_steps=max_steps):
        plus, times = spoiled.get(step.number, (0.0, 1.0))
        for micro in step:
            loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
            micro.backward(loss * times + plus if micro.slot == 3 else loss)
        outcomes.append(step.commit(max_grad_norm=clip))
        if outcomes[-1]:
            job.count.update(job.model)
        job.saving.wait_idle()
    return outcomes, weights(job), job.guarding.record


@pytest.mark.parametrize("spoiled", [(NAN, 1.0), (0.0, NAN)], ids=["loss", "loss and gradient"])
def test_a_step_that_is_not_finite_is_left_out_as_in_the_unsharded_job(spoiled):
    arguments = (SKIPS, {1: spoiled, 3: spoiled}, 7)
    expected = run(None, False, *arguments)
    assert expected[0].count(Outcome.SKIPPED) == 2
    for found in simulate(3).run(run, True, *arguments):
        assert found == expected


def names_of_slot_3(job):
    samples = ", ".join(map(str, job.schedule.sampler.indices(1, 3)))
    return f"slot 3 (worker {job.sharding.workers[job.sharding.waves.owners[3]]}): ", f"; samples {samples}"


@pytest.mark.parametrize("kind", ["module", "loss", "gradient"])
def test_the_error_names_slot_worker_samples_and_the_first_that_is_not_finite(kind):
    def main(group):
        run = RunOptions(progress=False, group=group, threads=1)
        job = make_job(sharded=True, copies=2, run=run, is_random=False)
        bad = []
        job.model.middle[3].register_forward_hook(lambda module, args, output: output * NAN if bad else None)

        def train():
            for step in job.steps(max_steps=3):
                for micro in step:
                    bad[:] = [True] if (step.number, micro.slot, kind) == (1, 3, "module") else []
                    loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
                    if (step.number, micro.slot) == (1, 3) and kind != "module":
                        loss = loss * NAN if kind == "loss" else Steep.apply(loss)
                    micro.backward(loss)
                step.commit()

        with pytest.raises(NonFinite) as caught:
            train()
        assert caught.value.slots == {3: tuple(job.schedule.sampler.indices(1, 3))}
        return names_of_slot_3(job), str(caught.value)

    told = simulate(3).run(main)
    assert len(set(told)) == 1, "all workers say the same"
    ((who, samples), message) = told[0]
    (line,) = [line.strip() for line in message.splitlines() if line.strip().startswith("slot ")]
    if kind == "gradient":
        assert line.startswith(
            f"{who}gradient is not finite{samples}; the first that is not finite is the gradient of "
        )
    else:
        where = {
            "module": "the first that is not finite is the output of module middle.3",
            "loss": "the output of every module is finite: it begins in the loss",
        }[kind]
        assert line == f"{who}loss is nan{samples}; {where}"


def test_a_loop_that_catches_the_error_goes_on_as_one_that_skips():
    spoiled = {1: (NAN, 1.0), 3: (0.0, NAN)}

    def main(group, sharded):
        run = RunOptions(progress=False, group=group, verify=True, threads=1)
        job = make_job(sharded=sharded, copies=2, guard=Guard(nonfinite="raise"), run=run, is_random=False)
        caught = []
        for step in job.steps(max_steps=7):
            plus, times = spoiled.get(step.number, (0.0, 1.0))
            for micro in step:
                loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
                micro.backward(loss * times + plus if micro.slot == 3 else loss)
            try:
                counts = bool(step.commit(max_grad_norm=0.5))
            except NonFinite as error:
                counts = True
                assert step.outcome is Outcome.SKIPPED
                caught.append((error.step, error.slots))
            if counts:
                job.count.update(job.model)
        return caught, weights(job), job.guarding.record

    expected = main(None, False)
    assert [step for step, _ in expected[0]] == [1, 3]
    assert expected[1:] == run(None, False, SKIPS, spoiled, 7)[1:]
    for found in simulate(3).run(main, True):
        assert found == expected


def test_too_many_in_a_row_stop_all_workers():
    def main(group):
        with pytest.raises(NonFinite) as caught:
            run(group, True, Guard(nonfinite="skip", max_skips=2), dict.fromkeys((1, 2, 3), (NAN, 1.0)), 7)
        return caught.value.step

    assert simulate(2).run(main) == [3, 3]


@pytest.mark.parametrize("on_spike", ["rollback", pytest.param("skip", marks=pytest.mark.soak)])
def test_a_spike_is_left_out_or_takes_all_workers_back_to_the_last_good_save(tmp_path, on_spike):
    spike, guard = {18: (0.0, 1e4)}, Guard(spike=50.0, on_spike=on_spike)
    saves = [Saves(directory=tmp_path / kind, every=5, keep=2) for kind in "ab"]
    expected = run(None, False, guard, spike, 21, saves[0])
    assert expected[0][18] is Outcome.SKIPPED
    assert expected[2].rollbacks == (on_spike == "rollback")
    for found in simulate(2).run(run, True, guard, spike, 21, saves[1]):
        assert found == expected


@pytest.mark.soak
def test_a_spike_without_a_save_stops_all_workers(tmp_path):
    def main(group):
        saves = Saves(directory=tmp_path, every=100)
        with pytest.raises(LossSpike, match="no save to go back to"):
            run(group, True, Guard(spike=50.0, on_spike="rollback"), {17: (0.0, 1e4)}, 19, saves, None)

    simulate(2).run(main)


class SpoiledWorld(ShardedWorld):
    """Its loss of one step is not finite; the gradient is, unless that is ``spoiled`` too."""

    spoiled_step = 3
    spoiled = (NAN, 1.0)

    def loss(self, job, micro):
        loss = super().loss(job, micro)
        return loss * self.spoiled[1] + self.spoiled[0] if micro.step.number == self.spoiled_step else loss


def undisturbed(plus, times):
    """Train as ``SpoiledWorld`` does, unsharded."""
    job = make_job(sharded=False, is_random=False, guard=SKIPS, run=RunOptions(progress=False, threads=1))
    for step in job.steps(max_steps=8):
        for micro in step:
            loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
            micro.backward(loss * times + plus if step.number == 3 else loss)
        step.commit(max_grad_norm=0.5)
        job.count.update(job.model)
    return weights(job)


def check_left_out(world):
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], 8)
    assert list(verdict.left_out) == [3]


@pytest.mark.parametrize("has_passed", [False, True], ids=["before", "after"])
def test_a_worker_dies_where_all_tell_which_gradients_are_not_finite(tmp_path, monkeypatch, has_passed):
    """That is behind the commit point: worker c dies before it has told, or when it has left the step out, and b has
    not heard the others."""
    spoiled, bad_grads, begun = (0.0, NAN), ShardedGuarding.bad_grads, []
    expected = undisturbed(*spoiled)
    world = SpoiledWorld(tmp_path, monkeypatch)
    world.spoiled, world.guard = spoiled, SKIPS

    def end(job):
        world.break_(0, "c")
        world.agree(1, "a", "b")
        raise Die

    def told_or_lost(guarding):
        job = world.here.job
        is_first = job.step == 3 and job.generation == 0
        begun.append((job.worker_id, job.step))
        if is_first and job.worker_id == "c" and not has_passed:
            end(job)
        found = bad_grads(guarding)
        if is_first and job.worker_id == "b" and has_passed:
            raise PeerLost("worker b was told to lose contact", generation=0)
        return found

    def on_commit(job, step, outcome):
        if step.number == 3 and job.worker_id == "c":
            end(job)

    monkeypatch.setattr(ShardedGuarding, "bad_grads", told_or_lost)
    results = world.run("abc", on_commit=on_commit)
    assert {("a", 3), ("b", 3), ("c", 3)} <= set(begun)
    assert isinstance(results["c"], Die)
    assert results["a"] == results["b"] == expected
    assert (3, "skipped") in world.told["a"].outcomes
    assert (3, "adopted" if has_passed else "skipped") in world.told["b"].outcomes
    check_left_out(world)


def test_who_missed_the_commit_point_leaves_the_step_out_as_those_did_who_passed_it(tmp_path, monkeypatch):
    expected = undisturbed(*SpoiledWorld.spoiled)
    world = SpoiledWorld(tmp_path, monkeypatch)
    world.guard = SKIPS

    def on_commit(job, step, outcome):
        if step.number == 3 and job.worker_id == "c":
            world.break_(0, "c")
            world.agree(1, "a", "b")
            raise Die

    def on_step(job, step):
        if step.number == 3 and job.worker_id == "b" and job.generation == 0:
            world.stack.enter_context(play(lose_result_at(job.rank, COMMIT_POINT)))

    world.agree(0, *"abc")
    with contextlib.ExitStack() as stack, world.watching():
        world.stack = stack
        for worker in "abc":
            world.start(worker, on_commit=on_commit, on_step=on_step)
        results = world.join()
    assert results["a"] == results["b"] == expected
    assert (3, "skipped") in world.told["a"].outcomes
    assert (3, "adopted") in world.told["b"].outcomes
    check_left_out(world)


def test_a_guard_costs_no_bit_and_no_collective_of_a_step():
    def collectives_of_steps(group, guard):
        job, told = make_job(group=group, copies=2, guard=guard, is_random=False), []
        for step in job.steps(max_steps=3):
            with observe(lambda event: told.append(event.name) if event.group.rank == group.rank else None):
                for micro in step:
                    micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
                step.commit(max_grad_norm=0.5)
        return told.count("all_gather_into_tensor"), sorted(told), weights(job)

    guards = (Guard(), Guard(nonfinite="ignore"), Guard(nonfinite="skip", spike=1e6))
    on, off, all_of_it = (simulate(2).run(collectives_of_steps, guard)[0] for guard in guards)
    assert on == off == all_of_it
    assert on[0] >= 3, "the commit points among them"


@pytest.mark.parametrize("spoiled", [(0.0, NAN), (NAN, 1.0)], ids=["loss and gradient", "loss"])
def test_a_job_without_a_guard_takes_what_comes_as_the_unsharded_job_does(spoiled):
    arguments = (Guard(nonfinite="ignore"), {1: spoiled}, 3, None, None)
    expected = run(None, False, *arguments)
    assert expected[0] == [Outcome.APPLIED] * 3
    assert simulate(2).run(run, True, *arguments) == [expected] * 2
