"""What follows the loop of a sharded job: the model is collected and evaluated, although workers are lost then."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from scripted_world import Die, Rows
from sharded_training import make_job, train, weights
from sharded_world import Fault, ShardedWorld
from torch.nn import functional as F

from phalanx.elastic import ResultLost, RunOptions, Saves

pytestmark = pytest.mark.timeout(600)
NUM_STEPS = 3
AFTER = NUM_STEPS
"""As the step that collectives after the loop are counted by."""


def score(job):
    return job.evaluate(Rows(30), lambda b: {"loss": F.cross_entropy(job.model(b[0]), b[1])}, batch_size=4)


def after(job):
    return score(job), weights(job), score(job)


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    job = make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    train(job, max_steps=NUM_STEPS)
    return after(job)


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(number=0, **settings):
        world = ShardedWorld(tmp_path / f"world{number}", monkeypatch)
        world.directory.mkdir()
        world.num_steps = NUM_STEPS
        for name, value in settings.items():
            setattr(world, name, value)
        return world

    return make


def run(world, workers, after):
    world.agree(0, *workers)
    with world.watching():
        for worker in workers:
            world.start(worker, after=after)
        return world.join()


@pytest.mark.parametrize("part", [0.55, *(pytest.param(each, marks=pytest.mark.soak) for each in (0.2, 0.8))])
def test_a_worker_that_dies_after_the_loop_is_done_without(make_world, undisturbed, part):
    """In the first evaluation, while the model is collected, and in the second evaluation."""
    world = make_world()
    assert run(world, "abc", after) == dict.fromkeys("abc", undisturbed)
    at = int(world.told["b"].collectives[AFTER] * part)
    world = make_world(1, faults=(Fault("b", AFTER, at, ("a", "c")),))
    results = run(world, "abc", after)
    assert isinstance(results["b"], Die)
    assert (results["a"], results["c"]) == (undisturbed, undisturbed)


def test_cells_that_are_lost_after_the_loop_are_an_error_that_names_what_is_left(make_world):
    world = make_world(copies=1, faults=(Fault("b", AFTER, 1, ("a", "c")),))
    results = run(world, "abc", lambda job: job.full_state_dict())
    for worker in "ac":
        assert isinstance(results[worker], ResultLost), results[worker]
        assert "after the last step. The newest save of the job is what is left" in str(results[worker])


def test_who_comes_when_the_others_have_collected_the_model_is_told_so(make_world, undisturbed):
    world = make_world()
    digests, is_told = {}, threading.Event()

    def collect(job):
        if job.worker_id != "d":
            found = after(job)
            if job.worker_id == "b":
                world.break_(0, "b")
                world.agree(1, "a", "d", "c")
                world.start("d", 1, after=collect)
                raise Die
            assert is_told.wait(200), "the one that came later hangs"
            return found
        digests["d"] = job.digest()
        try:
            return score(job), job.full_state_dict()
        finally:
            is_told.set()

    results = run(world, "abc", collect)
    assert results["a"] == undisturbed
    assert digests["d"] == undisturbed[1].split()[1]
    assert isinstance(results["d"], ResultLost), results["d"]
    assert "the others, who hold its cells, have had it and gone on" in str(results["d"])


def test_a_save_that_is_asked_for_is_made_by_all_workers_at_one_step(make_world, tmp_path, undisturbed):
    saves = Saves(directory=tmp_path / "saves")
    world = make_world(saves=saves)

    def ask(job, step):
        if job.worker_id == "c" and step.number == 1:  # the others have not heard of it yet
            job.regrouping.coordinator.signals.saves_asked = 1

    world.agree(0, *"abc")
    for worker in "abc":
        world.start(worker, on_step=ask, after=lambda job: job.saving.wait_idle())
    world.join()
    assert [path.name for path in (tmp_path / "saves").glob("step*")] == ["step-000000000002"]

    assert run(make_world(1, saves=saves), "de", after) == dict.fromkeys("de", undisturbed)
