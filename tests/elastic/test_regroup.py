"""Regroups of workers in threads of one process, with a script in the place of the agents: every order of events that
matters, forced by the script. Real processes and real agents are in ``test_faults``."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from scripted_world import Die, Rows, World
from torch.nn import functional as F

from phalanx import protocol as ms
from phalanx.elastic import Ejected, ResultLost, Saves
from phalanx.elastic.audit import check_directory
from phalanx.elastic.checkpoint._save_folder import find_save
from phalanx.errors import PeerLost
from phalanx.protocol import timeouts

pytestmark = [pytest.mark.fast, pytest.mark.timeout(300)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        world = World(tmp_path_factory.mktemp("alone"), patch)
        world.agree(0, "a")
        world.start("a")
        return world.join()["a"]


def die_at(number, then=lambda: None):
    def on_step(job, step):
        if step.number == number:
            then()
            raise Die

    return on_step


def test_three_workers_without_any_fault(world, alone):
    world.agree(0, "a", "b", "c")
    for worker in "abc":
        world.start(worker)
    assert world.join() == dict.fromkeys("abc", alone)
    assert world.news == [], "the first place is no regroup"


def test_survivors_go_on_and_the_replacement_gets_its_seat_at_a_boundary(world, alone):
    world.agree(0, "a", "b", "c")
    back_at_work = threading.Event()

    def watch(job, step):
        if step.number == 7:
            back_at_work.set()

    def heal():
        world.break_(0, "b")
        world.agree(1, "a", "d", "c")

    world.start("a", on_step=watch)
    world.start("b", on_step=die_at(4, heal))
    world.start("c")
    assert back_at_work.wait(100), "survivors did not wait for d, which has not even begun"
    world.start("d", 1)
    results = world.join()
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"] == alone
    assert results["d"] == alone or isinstance(results["d"], SystemExit), "it joined, or came after the end"
    first = world.news[0]
    assert (first.workers, first.left, first.joined) == (("a", "c"), ("b",), ())
    assert world.leavers == ["b", "b"], "both survivors were told"
    joined = [news for news in world.news if news.joined]
    assert set(world.newcomers) == ({"d"} if joined else set())
    verdict = check_directory(world.directory)
    assert verdict.problems == []
    assert verdict.num_dropped > 0


def test_a_generation_that_breaks_while_it_forms_is_skipped(world, alone):
    """b dies in generation 0, c before it takes its place in generation 1; a goes on alone in generation 2."""
    world.agree(0, "a", "b", "c")
    c_dies = threading.Event()

    def both_die():
        assert c_dies.wait(100)
        world.break_(0, "b")
        world.agree(1, "a", "c")
        world.keys.wait(["elastic/1/ready/a"], 100.0)  # a waits for c there
        world.break_(1, "c")
        world.agree(2, "a")

    world.start("a")
    world.start("b", on_step=die_at(3, both_die))
    world.start("c", on_step=die_at(3, c_dies.set))
    results = world.join()
    assert results["a"] == alone
    assert world.news[0].generation == 2
    assert check_directory(world.directory).problems == []


def test_an_ejected_worker_is_told_so(world, alone):
    world.agree(0, "a", "b")

    def eject():
        world.break_(0, "b")
        world.agree(1, "a")

    def on_step(job, step):
        if step.number == 2 and job.generation == 0:
            eject()
            world.await_end_of_group()
        elif job.generation == 1:  # were a to finish before b looks, b would only hear that the job is over
            world.threads[1].join(100)

    world.start("a", on_step=on_step)
    world.start("b")
    results = world.join()
    assert results["a"] == alone
    assert isinstance(results["b"], Ejected)
    assert "not among the members of generation 1" in str(results["b"])


def test_a_polite_leave_drops_no_step(world, alone):
    world.agree(0, "a", "b", "c")

    def leave(job, step):
        if step.number == 3:
            job.regrouping.leave.requested = True  # what SIGTERM does in the main thread

    world.start("a")
    world.start("b", on_step=leave)
    world.start("c")
    world.threads[1].join(100)
    assert isinstance(world.results["b"], SystemExit)
    assert world.results["b"].code == 0
    world.agree(1, "a", "c")  # the agent plans without it, and breaks the generation once it has gone
    world.break_(0)
    results = world.join()
    assert results["a"] == results["c"] == alone
    verdict = check_directory(world.directory)
    assert verdict.problems == []
    assert verdict.num_dropped == 0


def test_who_is_told_to_leave_when_its_part_of_the_step_has_gone_out_still_saves(world, alone):
    """SIGTERM reaches a before its part of step 3 goes out, b after: to each, the other seems to stay."""
    world.saves = Saves(directory=world.directory / "saves")
    world.agree(0, "a", "b")

    def leave(job, step):
        if step.number == 3 and job.worker_id == "b":
            step.reduce()
        if step.number == 3:
            job.regrouping.leave.requested = True

    world.start("a", on_step=leave)
    world.start("b", on_step=leave)  # no agent agrees on another generation any more
    results = world.join()
    assert [(type(results[worker]), results[worker].code) for worker in "ab"] == [(SystemExit, 0)] * 2
    save, problems = find_save(world.directory / "saves")
    assert (save.step, problems) == (4, [])

    with pytest.MonkeyPatch.context() as patch:
        later = World(world.directory / "later", patch)
        later.saves = world.saves
        later.agree(0, "a")
        later.start("a")
        assert later.join()["a"] == alone


def test_an_evaluation_survives_a_death_and_newcomers_stay_out_of_it(world):
    """Every batch is scored at least once and counted once; the mean is that of one worker. What scoring does to the
    model's buffers is no part of the state that the survivors compare and newcomers get."""
    lock, scored = threading.Lock(), []

    def evaluate(dies_after=None):
        def run(job):
            def score(batch):
                with lock:
                    mine = job.worker_id
                    scored.append(mine)
                    if dies_after is not None and scored.count(mine) > dies_after:
                        world.break_(0, "b")
                        world.agree(1, "a", "x", "c")
                        raise Die
                job.model.seen += batch[0].sum()  # as a module may do in its forward pass
                return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}

            return job.evaluate(Rows(64), score, batch_size=4)["loss"]

        return run

    world.agree(0, "a", "b", "c")
    world.start("a", after=evaluate())
    world.start("b", after=evaluate(dies_after=2))
    world.start("c", after=evaluate())
    results = world.join()
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"]
    counts = {worker: scored.count(worker) for worker in "abc"}
    assert counts["a"] + counts["c"] == 16, "what b had not told about was scored by the others"

    with pytest.MonkeyPatch.context() as patch:
        lone = World(world.directory / "lone", patch)
        lone.agree(0, "a")
        lone.start("a", after=evaluate())
        assert lone.join()["a"] == results["a"]


def test_who_comes_after_the_end_goes_away_with_code_0(world, alone):
    world.agree(0, "a")
    world.start("a")
    assert world.join() == {"a": alone}
    world.agree(1, "z")
    world.start("z", 1)
    late = world.join()["z"]
    assert isinstance(late, SystemExit)
    assert late.code == 0


def test_a_replacement_takes_the_rank_and_the_state_though_the_first_to_hand_it_over_dies(world, alone):
    """a is lost after the last step; b, which d asks first, is lost while it hands over; c then gives d the state."""
    world.agree(0, "a", "b", "c")
    dead, is_handed, seen = threading.Event(), threading.Event(), {}

    def after(job):
        if job.worker_id == "a":
            world.break_(0, "a")
            world.agree(1, "d", "b", "c")
            dead.set()
            raise Die
        if job.worker_id == "b":
            server = job.regrouping._server
            server._stop.set()  # it says that it keeps the state, but never answers
            server._thread.join()
            world.keys.wait(["elastic/1/ask/b/d"], 100.0)
            world.break_(1, "b")
            world.agree(2, "d", "e", "c")
            raise Die
        if job.worker_id == "c":
            for param in job.model.parameters():
                param.data.zero_()  # the script's own business: d gets what it was
            assert is_handed.wait(100)
            return job.rank
        seen[job.worker_id] = (job.rank, job.world_size, job.step)
        if len(seen) == 2:
            is_handed.set()
        return job.digest()

    for worker in "abc":
        world.start(worker, after=after)
    assert dead.wait(100)
    world.keys.set("elastic/1/keeps/b", b"1")
    world.start("d", 1, after=after)
    world.threads[1].join(100)
    world.start("e", 2, after=after)
    results = world.join()
    assert results["d"] == results["e"] == alone
    assert results["c"] == 2
    assert seen == {"d": (0, 3, 15), "e": (1, 3, 15)}


def test_without_a_kept_state_a_loss_after_the_last_step_is_an_error(world, alone):
    world.agree(0, "a", "b")
    world.hold = 0.0
    dead, asked = threading.Event(), threading.Event()

    def after(job):
        if job.worker_id == "a":
            world.break_(0, "a")
            world.agree(1, "d", "b")
            dead.set()
            raise Die
        assert asked.wait(100)
        return job.digest()

    world.start("a", after=after)
    world.start("b", after=after)
    assert dead.wait(100)
    world.start("d", 1)
    world.threads[2].join(100)
    asked.set()
    results = world.join()
    assert results["b"] == alone
    assert isinstance(results["d"], ResultLost)
    assert "takes the place of rank 0" in str(results["d"])


def test_a_worker_says_again_that_it_can_regroup_when_that_is_gone(world, alone):
    """Else the agents would take its script for one that cannot, and start all workers anew at the next death."""
    key = ms.regroups_key("a")

    def on_step(job, step):
        if step.number in (2, 7):
            world.keys.delete(key)
            world.keys.wait([key], 100)

    world.agree(0, "a", "b")
    world.start("a", on_step=on_step)
    world.start("b")
    assert world.join() == {"a": alone, "b": alone}


def test_a_worker_leaves_a_generation_that_has_a_successor_though_nobody_says_that_it_is_over(
    world, alone, monkeypatch
):
    """A stranger wrote over the record that says so, before this worker could read it."""
    monkeypatch.setattr(timeouts, "STALE_AFTER", 0.1)
    world.agree(0, "a", "b")  # b never comes
    world.agree(1, "a")
    world.start("a")
    assert world.join() == {"a": alone}


def test_who_comes_for_the_last_that_had_the_final_state_does_not_wait_for_one_that_was_not_needed(
    world, alone, monkeypatch
):
    """b dies at the last step; s comes for it when all is done and goes with code 0; then a dies, before its script
    has ended. Whoever comes for a begins with a save, though s is still a member and will never come."""
    monkeypatch.setattr(timeouts, "KEEPS_AFTER", 0.1)
    world.saves = Saves(directory=world.directory / "saves", every=7)

    def after(job):
        world.start("s", generation=1)
        world.threads[-1].join(100)
        world.keys.set(ms.ended_key("s"), b"1")  # as its agent does
        world.break_(1, "a")
        world.agree(2, "n", "s")
        raise Die

    def die():
        world.break_(0, "b")
        world.agree(1, "a", "s")

    world.agree(0, "a", "b")
    world.start("a", after=after)
    world.start("b", on_step=die_at(14, die))
    world.join()
    assert isinstance(world.results["s"], SystemExit)
    world.start("n", generation=2)
    assert world.join()["n"] == alone


def test_lost_contact_is_told_again_until_the_agents_have_heard_of_it(world, alone):
    """They did not: a stranger wrote over what a worker said before they looked."""

    def on_step(job, step):
        if job.generation == 0 and step.number == 4 and job.worker_id == "b":
            job.regrouping.membership.group.abort(PeerLost("the network", generation=0))
            threading.Thread(target=agents, daemon=True).start()

    def agents():
        said = [ms.contact_key(0, "b"), ms.any_contact_key(0)]
        world.keys.wait(said, 100)
        for key in said:
            world.keys.delete(key)
        world.keys.wait(said, 100)
        world.agree(1, "a", "b")

    world.agree(0, "a", "b")
    world.start("a", on_step=on_step)
    world.start("b", on_step=on_step)
    assert world.join() == {"a": alone, "b": alone}
