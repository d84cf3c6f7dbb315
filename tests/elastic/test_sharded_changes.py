"""Sharded workers join, leave, are replaced and are lost beyond what copies allow, while the job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharded_training
from scripted_world import Die, Rows
from sharded_training import make_job, train, weights
from sharded_world import Fault, ShardedWorld
from torch.nn import functional as F

from log_lines import read_lines
from phalanx.elastic import RunOptions, Saves
from phalanx.elastic.audit import check_directory

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 12


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], str]:
    job = make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    return train(job, max_steps=NUM_STEPS), weights(job)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardedWorld:
    made = ShardedWorld(tmp_path, monkeypatch)
    made.num_steps = NUM_STEPS
    return made


def events(world, worker, kind):
    return [line for line in read_lines(world.directory / f"events-{worker}.jsonl") if line.get("event") == kind]


def check(world, results, undisturbed, workers):
    for worker in workers:
        assert results[worker] == undisturbed[1], (worker, results[worker])
        told = {one[0]: one for one in undisturbed[0]}
        assert all(one == told[one[0]] for one in world.told[worker].steps)
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], world.num_steps)


def test_a_replacement_computes_at_once_and_is_filled_while_the_others_train(world, undisturbed):
    world.faults = (Fault("b", 2, 9, ("a", "d", "c")),)

    def on_step(job, step):
        if step.number == 5 and job.worker_id == "a":
            world.start("d", 1)
            world.await_newcomer()

    world.agree(0, *"abc")
    with world.watching():
        for worker in "abc":
            world.start(worker, on_step=on_step)
        results = world.join()
    check(world, results, undisturbed, "acd")
    held = events(world, "d", "cells_held")
    assert held[0]["cells"] == 0, "it begins without cells"
    assert sum(one["cells"] for one in events(world, "d", "cells_moved")) > 0
    assert [number for number, outcome in world.told["a"].outcomes if outcome == "dropped"] == [2]
    first = world.told["d"].outcomes[0][0]
    assert first < NUM_STEPS - 2, "it came in time to be filled"


def test_a_worker_that_comes_behind_the_last_step_ends_with_the_others(world, undisturbed):
    """It has begun no step, and takes part in what ends the loop all the same."""
    world.faults = (Fault("b", 2, 9, ("a", "d", "c")),)

    def on_step(job, step):
        if step.number == NUM_STEPS - 1 and job.worker_id == "a":
            world.start("d", 1, after=lambda job: job.digest())
            world.await_newcomer()

    world.agree(0, *"abc")
    with world.watching():
        for worker in "abc":
            world.start(worker, on_step=on_step, after=lambda job: job.digest())
        results = world.join()
    digest = undisturbed[1].split()[1]
    assert [results[worker] for worker in "acd"] == [digest] * 3
    assert world.told["d"].outcomes == []


@pytest.mark.parametrize("copies", [1, 2])
def test_a_polite_leave_hands_its_cells_over_and_drops_no_step(world, undisturbed, copies):
    world.copies = copies
    world.agree(0, "a", "b", "c")

    def leave(job, step):
        if step.number == 3:
            job.regrouping.leave.requested = True

    world.start("a")
    world.start("b", on_step=leave)
    world.start("c")
    world.threads[1].join(200)
    assert isinstance(world.results["b"], SystemExit)
    world.break_(0, "b")
    world.agree(1, "a", "c")
    results = world.join()
    check(world, results, undisturbed, "ac")
    assert not any(outcome == "dropped" for _, outcome in world.told["a"].outcomes)


@pytest.fixture(scope="module")
def undisturbed_with_two_slots() -> tuple[list[Any], str]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sharded_training, "NUM_SLOTS", 2)
        job = make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    return train(job, max_steps=NUM_STEPS), weights(job)


def test_as_many_leave_as_there_are_slots_and_the_others_go_on(undisturbed_with_two_slots, world, monkeypatch):
    """In a sharded job workers without a slot are heard too: that as many leave as carry slots does not mean all."""
    monkeypatch.setattr(sharded_training, "NUM_SLOTS", 2)
    world.agree(0, "a", "b", "c")

    def leave(job, step):
        if step.number == 3:
            job.regrouping.leave.requested = True

    world.start("a")
    world.start("b", on_step=leave)
    world.start("c", on_step=leave)
    for thread in world.threads[1:]:
        thread.join(200)
    assert all(isinstance(world.results[worker], SystemExit) for worker in "bc")
    world.break_(0, "b", "c")
    world.agree(1, "a")
    check(world, world.join(), undisturbed_with_two_slots, "a")


def test_a_loss_beyond_the_copies_goes_back_to_the_last_save_by_itself(world, undisturbed, capfd):
    world.copies = 1
    world.saves = Saves(directory=world.directory / "saves", every=2)
    world.faults = (Fault("b", 7, 9, ("a", "c")),)

    def on_commit(job, step, outcome):
        job.saving.wait_idle()

    results = world.run("abc", on_commit)
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"] == undisturbed[1]
    told = capfd.readouterr().err
    assert "cells were lost with their last holders at step 7: the job goes back from step 7 to step 6" in told
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], NUM_STEPS)


def test_an_evaluation_goes_on_when_a_worker_is_lost_in_it(world, undisturbed):
    found = {}

    def score(job, batch):
        return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}

    def on_commit(job, step, outcome):
        if outcome and step.number == 4:
            if job.worker_id == "b":
                world.faults = (Fault("b", 4, world.here.told.collectives[4] + 5, ("a", "c")),)
            found.setdefault(job.worker_id, []).append(job.evaluate(Rows(30), lambda b: score(job, b), batch_size=4))

    results = world.run("abc", on_commit)
    assert isinstance(results["b"], Die)
    check(world, results, undisturbed, "ac")
    assert found["a"] == found["c"]
    assert len(found["a"]) == 1
