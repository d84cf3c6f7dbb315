"""Sharded workers are lost at any moment: the others go on without moving state, with the same bits."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_world import Die
from sharded_training import make_job, train, weights
from sharded_world import COMMIT_POINT, Fault, ShardedWorld

from log_lines import read_lines
from phalanx.comm import observe
from phalanx.comm.faults import lose_result_at, play
from phalanx.elastic import RunOptions, Saves, StepsLost, _sharded_step
from phalanx.elastic._sharded_step import ShardedStep
from phalanx.elastic.audit import check_directory
from phalanx.elastic.sharded._sharded_level import CellsLost
from phalanx.errors import CollectiveMismatch, JobStopped, PeerLost

pytestmark = pytest.mark.timeout(600)

STEP = 3


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], str]:
    job = make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    return train(job), weights(job)


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ShardedWorld]:
    made = []

    def make(**settings):
        made.append(ShardedWorld(tmp_path / f"world{len(made)}", monkeypatch))
        made[-1].directory.mkdir()
        for name, value in settings.items():
            setattr(made[-1], name, value)
        return made[-1]

    return make


def check(world, results, undisturbed, survivors):
    for worker in survivors:
        assert results[worker] == undisturbed[1], (worker, results[worker])
        assert world.told[worker].steps == undisturbed[0]
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], world.num_steps)


def kill_at(make_world, undisturbed, at, workers="abc", victim="b", **settings):
    survivors = tuple(worker for worker in workers if worker != victim)
    world = make_world(faults=(Fault(victim, STEP, at, survivors),), **settings)
    results = world.run(workers)
    assert world.faults[0].is_done, f"worker {victim} issues no collective {at} in step {STEP}"
    if at == COMMIT_POINT:
        assert world.faults[0].name == "all_gather_into_tensor"
    assert isinstance(results[victim], Die)
    check(world, results, undisturbed, survivors)
    return world


def test_the_commit_point_is_where_these_tests_look_for_it(make_world, monkeypatch):
    """It is the last collective of a step, and the only one in which verdicts are exchanged."""
    world, exchange, found = make_world(), _sharded_step.exchange_verdict, {}

    def noted(group, *args, **keywords):
        told, step, before = world.here.told, world.here.step, len(names())
        verdict = exchange(group, *args, **keywords)
        found[world.here.job.worker_id, step] = (told.collectives[step] - 1, names()[before:])
        return verdict

    def names():
        return world.here.__dict__.setdefault("names", [])

    def note(event):
        if getattr(world.here, "job", None) is not None:
            names().append(event.name)

    monkeypatch.setattr(_sharded_step, "exchange_verdict", noted)
    with observe(note):
        world.run("abc")
    assert {worker: found[worker, STEP] for worker in "abc"} == dict.fromkeys(
        "abc", (COMMIT_POINT, ["all_gather_into_tensor"])
    )
    assert {told.collectives[STEP] for told in world.told.values()} == {COMMIT_POINT + 1}


@pytest.mark.parametrize("at", [9, COMMIT_POINT])
def test_a_worker_that_dies_in_a_step_costs_the_step_and_nothing_else(make_world, undisturbed, at):
    world = kill_at(make_world, undisturbed, at)
    assert (STEP, "dropped") in world.told["a"].outcomes
    received = [line for line in read_lines(world.directory / "events-a.jsonl") if line.get("event") == "received"]
    assert not received, "no state moved"


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.timeout(3000)
def test_a_worker_dies_at_every_collective_of_a_step(make_world, undisturbed, victim):
    whole = make_world()
    whole.run("abc")
    for at in range(whole.told[victim].collectives[STEP]):
        kill_at(make_world, undisturbed, at, victim=victim)


def test_who_missed_the_commit_point_that_others_passed_rolls_forward(make_world, undisturbed):
    world = make_world()

    def on_commit(job, step, outcome):
        if step.number == STEP and job.worker_id == "c":
            world.break_(0, "c")
            world.agree(1, "a", "b")
            raise Die

    def on_step(job, step):
        if step.number == STEP and job.worker_id == "b" and job.generation == 0:
            world.stack.enter_context(play(lose_result_at(job.rank, COMMIT_POINT)))

    world.agree(0, *"abc")
    with contextlib.ExitStack() as stack, world.watching():
        world.stack = stack
        for worker in "abc":
            world.start(worker, on_commit=on_commit, on_step=on_step)
        results = world.join()
    check(world, results, undisturbed, "ab")
    assert (STEP, "adopted") in world.told["b"].outcomes
    assert (STEP, "applied") in world.told["a"].outcomes


@pytest.mark.parametrize("losing", ["", "b", "ab"], ids=["all pass", "one loses the result", "all lose the result"])
def test_a_worker_dies_between_the_commit_point_and_its_update(make_world, undisturbed, monkeypatch, losing):
    """Worker c has passed and changes nothing any more. Of the others, some lose contact when they have the result."""
    world = make_world()
    passed = {worker: threading.Event() for worker in "abc"}
    pass_commit_point, apply = ShardedStep._pass_commit_point, ShardedStep.apply

    def is_due(step):
        return step.number == STEP and step.job.generation == 0

    def wait_for(workers):
        for worker in workers:
            assert passed[worker].wait(100), f"worker {worker} has not come there"

    def pass_or_lose(step):
        verdict = pass_commit_point(step)
        worker = step.job.worker_id
        if is_due(step) and worker in losing:
            passed[worker].set()
            wait_for("c")
            raise PeerLost(f"worker {worker} was told to lose contact", generation=0)
        return verdict

    def apply_or_die(step, verdict):
        worker = step.job.worker_id
        if is_due(step) and worker == "c":
            passed["c"].set()
            wait_for("ab")
            world.break_(0, "c")
            world.agree(1, "a", "b")
            raise Die
        apply(step, verdict)
        if is_due(step):
            passed[worker].set()

    monkeypatch.setattr(ShardedStep, "_pass_commit_point", pass_or_lose)
    monkeypatch.setattr(ShardedStep, "apply", apply_or_die)
    results = world.run("abc")
    assert isinstance(results["c"], Die)
    check(world, results, undisturbed, "ab")
    first = {worker: next(how for number, how in world.told[worker].outcomes if number == STEP) for worker in "ab"}
    assert first == {
        "": {"a": "applied", "b": "applied"},
        "b": {"a": "applied", "b": "adopted"},
        "ab": {"a": "dropped", "b": "dropped"},
    }[losing]  # fmt: skip


def test_two_losses_within_three_copies_cost_nothing(make_world, undisturbed):
    both = (Fault("b", STEP, 10, ("a", "d")), Fault("c", STEP, 10, ("a", "d")))
    world = make_world(copies=3, faults=both)
    results = world.run("abcd")
    check(world, results, undisturbed, "ad")


def test_losses_one_after_the_other_cost_nothing_since_copies_are_made_anew(make_world, undisturbed):
    faults = (Fault("b", 2, 10, ("a", "c")), Fault("c", 6, 10, ("a",)))
    world = make_world(faults=faults)
    results = world.run("abc")
    check(world, results, undisturbed, "a")
    held = [line for line in read_lines(world.directory / "events-a.jsonl") if line.get("event") == "cells_held"]
    assert held[1]["unprotected"] > 0
    moved = [line for line in read_lines(world.directory / "events-a.jsonl") if line.get("event") == "cells_moved"]
    assert sum(line["cells"] for line in moved) > 0


@pytest.mark.parametrize("when", ["send", pytest.param("recv", marks=pytest.mark.soak)])
def test_a_worker_that_dies_while_copies_are_made_anew_costs_nothing_either(make_world, undisturbed, when):
    """Whoever sends or receives cells first is killed in the middle of it."""
    first = Fault("b", 2, 10, ("a", "c", "d"))
    others = [Fault(w, 2, -1, tuple(o for o in "acd" if o != w), when=when) for w in "acd"]
    world = make_world(copies=3, faults=(first, *others))
    kill = world.kill

    def once(job, fault):
        if fault is not first:
            for one in others:
                one.is_done = True  # one of them is enough
        kill(job, fault)

    world.kill = once
    results = world.run("abcd")
    dead = [worker for worker, result in results.items() if isinstance(result, Die)]
    assert len(dead) == 2, results
    check(world, results, undisturbed, [worker for worker in "abcd" if worker not in dead])


def test_a_loss_beyond_the_copies_before_the_first_save_ends_all_workers_to_begin_anew(make_world, tmp_path):
    saves = Saves(directory=tmp_path / "saves", every=100)
    world = make_world(copies=1, saves=saves, faults=(Fault("b", STEP, 9, ("a", "c")),))
    results = world.run("abc")
    for worker in "ac":
        assert isinstance(results[worker], CellsLost)
        assert not isinstance(results[worker], JobStopped), "launchers replace these workers"


def test_a_loss_beyond_the_copies_without_saves_says_what_was_lost(make_world):
    world = make_world(copies=1, faults=(Fault("b", STEP, 9, ("a", "c")),))
    results = world.run("abc")
    for worker in "ac":
        assert isinstance(results[worker], StepsLost)
        assert "cells were lost with their last holders at step 3" in str(results[worker])


class Wandering(ShardedWorld):
    """In the last wave, in which worker c only follows, the others run one unit alone."""

    copies = "all"
    alone = "middle"

    def loss(self, job, micro):
        if micro.slot < 6 or job.world_size < 3:
            return super().loss(job, micro)
        unit = job.model.get_submodule(self.alone)
        return unit(torch.ones(4, {"first": 8, "middle": 40}[self.alone])).sum()


@pytest.mark.parametrize(
    ("alone", "found", "before"),
    [("first", "reduces unit 'first'", "unit 'middle'"), ("middle", "reduces no more units", "unit 'first'")],
)
def test_a_micro_batch_that_runs_other_units_than_those_before_it_is_named(tmp_path, monkeypatch, alone, found, before):
    world = Wandering(tmp_path, monkeypatch)
    world.alone = alone
    world.agree(0, *"abc")
    for worker in "abc":
        world.start(worker)
    for thread in world.threads[:2]:
        thread.join(200)
    world.break_(0, *"ab")
    world.agree(1, "c")
    results = world.join()
    for worker in "ab":
        assert isinstance(results[worker], CollectiveMismatch), results[worker]
        said = f"rank \\d {found} where earlier micro-batches of the step reduced {before};"
        assert re.match(said, str(results[worker])), results[worker]
    assert isinstance(results["c"], str), "it follows nobody any more, and goes on"
