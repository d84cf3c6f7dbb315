"""A worker is lost when some have applied a step and others have not: who is behind takes the step over.

The script lets one worker miss the end of a step's last collective, which by chance is hardly ever met.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from scripted_world import Die, Rows, World
from torch.nn import functional as F

from log_lines import read_lines
from phalanx.comm.faults import lose_result_at, play
from phalanx.elastic import Outcome, Saves
from phalanx.elastic._boundary import Boundary
from phalanx.elastic.audit import check_directory
from phalanx.elastic.checkpoint._save_folder import find_save

pytestmark = [pytest.mark.fast, pytest.mark.timeout(300)]

LAST_OF_EPOCH = 4


class Script:
    """b misses the end of ``step``; ``dies`` dies after it: all others have committed it."""

    def __init__(self, world, step, dies="c", workers="abc", collective="all_gather_into_tensor"):
        self.world, self.step, self.dies, self.workers = world, step, dies, workers
        self.collective = collective
        self.outcomes = {worker: [] for worker in workers}
        self.told = {worker: [] for worker in workers}
        self.evaluated = {worker: [] for worker in workers}
        self.evaluations = 0
        self.stack = contextlib.ExitStack()
        self.lost = threading.Event()

    def run(self):
        self.world.agree(0, *self.workers)
        for worker in self.workers:
            self.world.start(worker, on_step=self.on_step, on_commit=self.on_commit)
        try:
            return self.world.join()
        finally:
            self.stack.close()

    def on_step(self, job, step):
        if job.generation == 0 and step.number == self.step and job.worker_id == "b":
            self.stack.enter_context(play(lose_result_at(job.rank, 0, name=self.collective)))

    def on_commit(self, job, step, outcome):
        self.outcomes[job.worker_id].append((step.number, outcome))
        self.told[job.worker_id].append((step.number, step.loss, step.grad_norm, step.num_samples))
        if step.number == self.step and job.worker_id == self.dies:
            self.world.break_(0, self.dies)
            self.world.agree(1, *(worker for worker in self.workers if worker != self.dies))
            raise Die
        for _ in range(self.evaluations if outcome and step.is_last_of_epoch else 0):
            found = job.evaluate(Rows(30), lambda batch: self.score(job, batch), batch_size=4)
            self.evaluated[job.worker_id].append((step.number, found))

    @staticmethod
    def score(job, batch):
        mean = sum(float(value.sum()) for value in job._parts.others["mean"].values)
        return {"loss": F.cross_entropy(job.model(batch[0]), batch[1]), "mean": mean}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def alone(directory, evaluations=0):
    with pytest.MonkeyPatch.context() as patch:
        script = Script(World(directory, patch), -1, workers="a")
        script.evaluations = evaluations
        return script.run()["a"], script


def test_the_one_behind_adopts_the_step_and_what_follows_commits_runs_once_everywhere(world, tmp_path):
    digest, lone = alone(tmp_path / "alone")
    script = Script(world, 6)
    results = script.run()
    assert isinstance(results["c"], Die)
    assert results["a"] == results["b"] == digest
    assert script.outcomes["a"][:8] == [
        *((n, Outcome.APPLIED) for n in range(7)),
        (7, Outcome.DROPPED),
    ]
    assert script.outcomes["b"][:8] == [
        *((n, Outcome.APPLIED) for n in range(6)),
        (6, Outcome.ADOPTED),
        (7, Outcome.APPLIED),
    ]
    assert script.told["b"] == lone.told["a"], "loss, norm and samples of the adopted step are those of the others"
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], 15)


@pytest.mark.parametrize("evaluations", [1, 2])
def test_an_evaluation_after_the_adopted_step_runs_on_every_worker_alike(world, tmp_path, evaluations):
    """``if step.commit() and step.is_last_of_epoch: job.evaluate(...)``, with an average that each commit updates."""
    digest, lone = alone(tmp_path / "alone", evaluations)
    script = Script(world, LAST_OF_EPOCH)
    script.evaluations = evaluations
    results = script.run()
    assert results["a"] == results["b"] == digest
    assert (LAST_OF_EPOCH, Outcome.ADOPTED) in script.outcomes["b"]
    assert script.evaluated["a"] == script.evaluated["b"] == lone.evaluated["a"]
    assert len(script.evaluated["a"]) == 3 * evaluations


def test_the_last_step_is_adopted_too(world, tmp_path):
    digest, _ = alone(tmp_path / "alone")
    script = Script(world, 14)
    results = script.run()
    assert results["a"] == results["b"] == digest
    assert script.outcomes["b"][-1] == (14, Outcome.ADOPTED)


@pytest.mark.parametrize("workers", ["abc", "acb"], ids=["adopter", "applier"])
def test_the_save_and_the_event_of_a_first_worker_that_died_are_made_up_for(world, workers):
    """a dies between its commit and its save; b, which adopts the step, or c is the first then."""
    world.saves = Saves(directory=world.directory / "saves", every=7, keep=9)
    script = Script(world, 6, dies="a", workers=workers)
    results = script.run()
    assert results["b"] == results["c"]
    assert (6, Outcome.ADOPTED) in script.outcomes["b"]
    save, problems = find_save(world.directory / "saves")
    assert problems == []
    assert (world.directory / "saves" / "step-000000000007").is_dir()
    assert save.step == 14
    events = [e for path in world.directory.glob("events-*.jsonl") for e in read_lines(path)]
    told = {event["step"]: event for event in events if event["event"] == "step"}
    assert sorted(told) == list(range(15))
    assert told[6]["worker"] == workers[1]


def test_a_boundary_answers_what_the_others_know_and_holds_objects_until_their_place():
    mine = Boundary()
    mine.adopt({"results": [{"x": 1.0}], "evaluating": True}, {"mean": "theirs"})
    assert (mine.is_evaluating, mine.is_past, mine.held) == (True, False, {"mean": "theirs"})
    assert mine.take_held(at_evaluation=True) == {}, "they are one evaluation further"
    assert mine.recorded() == {"x": 1.0}
    mine.num_calls += 1
    assert mine.recorded() is None
    assert mine.take_held(at_evaluation=True) == {"mean": "theirs"}
    assert (mine.is_evaluating, mine.held) == (False, {})
    mine.adopt({"results": [{"x": 1.0}], "evaluating": False}, {"mean": "theirs"})
    assert (mine.is_evaluating, mine.is_past) == (False, True)
    assert mine.take_held(at_evaluation=True) == {}, "they are past this boundary"
    assert mine.take_held(at_evaluation=False) == {"mean": "theirs"}
    newcomer = Boundary()
    newcomer.load_state_dict(mine.state_dict(is_evaluating=False))
    assert newcomer.num_calls == 1, "it never comes to the evaluations of a boundary before it joined"
