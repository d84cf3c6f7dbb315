"""A loop with state of its own, as a trainer has: its schedulers, counters and logs, and it decides the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from scripted_world import Die, Rows, World
from test_adopted import Script
from torch import nn
from torch.nn import functional as F

from phalanx.elastic import Callbacks, Guard, Job, Outcome, RunOptions, write_once
from phalanx.elastic._slot_logs import SlotLogs
from phalanx.elastic.membership._rounds import choose_writer

pytestmark = [pytest.mark.fast, pytest.mark.timeout(300)]

NUM_STEPS = 9


class Loop:
    """What the loop changes after each commit; it counts how often its state is asked for."""

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        self.told: list[list] = []
        self.num_asked = 0

    def after(self, step) -> None:
        self.scheduler.step()
        self.told.append([step.number, step.loss, step.logs, self.scheduler.get_last_lr()])

    def state_dict(self):
        self.num_asked += 1
        return {"scheduler": self.scheduler.state_dict(), "told": self.told}

    def load_state_dict(self, state) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.told = list(state["told"])


class LoopWorld(World):
    """Workers whose loop ends when it likes to, with a scheduler that multiplies what it finds."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, monkeypatch)
        self.loops: dict[str, Loop] = {}
        self.writers: dict[str, list[str]] = {}
        self.was_writer: dict[str, list[bool]] = {}

    def train(self, on_step, after, on_commit):
        torch.manual_seed(0)
        with torch.random.fork_rng():
            generator = torch.Generator().manual_seed(0)
            model = nn.Linear(8, 5)
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop = Loop(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        heard: list[str] = []
        job = Job(
            model,
            optimizer,
            Rows(),
            num_slots=8,
            slot_batch_size=4,
            run=RunOptions(progress=False, verify=True, log_dir=self.directory),
            callbacks=Callbacks(on_writer=heard.append),
            loop_state={"loop": loop},
        )
        self.loops[job.worker_id], self.writers[job.worker_id] = loop, heard
        self.was_writer[job.worker_id] = []
        try:
            for step in job.steps(until_finish=True):
                self.was_writer[job.worker_id].append(job.is_writer)
                for micro in step:
                    outputs = model(micro.inputs)
                    micro.log("accuracy", (outputs.argmax(1) == micro.targets).float().mean())
                    micro.backward(F.cross_entropy(outputs, micro.targets))
                on_step(job, step)
                outcome = step.commit(max_grad_norm=1.0)
                if outcome:
                    loop.after(step)
                    if len(loop.told) == NUM_STEPS:
                        job.finish()
                on_commit(job, step, outcome)
            if after is not None:
                after(job)
            return job.digest(), optimizer.param_groups[0]["lr"], loop.told, job.step
        finally:
            job.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopWorld:
    return LoopWorld(tmp_path, monkeypatch)


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        lone = LoopWorld(tmp_path_factory.mktemp("alone"), patch)
        lone.agree(0, "a")
        lone.start("a")
        found = lone.join()["a"]
    assert found[3] == NUM_STEPS
    return found


def test_a_survivor_that_takes_a_step_over_keeps_its_loop_and_learning_rate(world, undisturbed):
    """c dies when a has run what follows the step, its scheduler too, and b has not applied the step."""
    script = Script(world, 4, collective="all_gather")  # that of the logs, the last one of a step
    results = script.run()
    assert (4, Outcome.ADOPTED) in script.outcomes["b"]
    assert isinstance(results["c"], Die)
    assert results["a"] == results["b"] == undisturbed
    assert world.loops["a"].num_asked == 1, "for the end of the job alone: no survivor needs it"


def test_a_newcomer_takes_the_loop_too_and_the_oldest_worker_writes(world, undisturbed):
    """a, the writer, dies; its replacement d has rank 0 at once, and b, the oldest then, writes."""

    def on_step(job, step):
        if step.number == 3 and job.worker_id == "a":
            world.break_(0, "a")
            world.agree(1, "d", "b", "c")
            world.start("d", 1)
            raise Die
        if step.number == 5 and job.worker_id == "b" and job.world_size == 2:
            wait_for(lambda: job.regrouping.coordinator.signals.wish)

    world.agree(0, "a", "b", "c")
    for worker in "abc":
        world.start(worker, on_step=on_step)
    results = world.join()
    assert results["b"] == results["c"] == results["d"] == undisturbed
    assert world.was_writer["b"][0] is False
    assert world.was_writer["b"][-1] is True
    assert not any(world.was_writer["c"] + world.was_writer["d"])
    assert (world.writers["b"], world.writers["c"], world.writers["d"]) == (["b"], ["b"], [])


def test_a_newcomer_that_joins_after_the_last_commit_gets_no_step(world, undisturbed):
    """It is let in at the boundary behind the step after which the loop says that it is over."""

    def on_step(job, step):
        if step.number == 2 and job.worker_id == "x":
            world.break_(0, "x")
            world.agree(1, "a", "b", "c")
            raise Die
        if step.number == NUM_STEPS - 1:
            with starting:
                if len(world.threads) == 3:
                    world.start("c", 1, on_step=on_step)
            wait_for(lambda: job.regrouping.coordinator.signals.wish)

    starting = threading.Lock()
    world.agree(0, "a", "b", "x")
    for worker in "abx":
        world.start(worker, on_step=on_step)
    results = world.join()
    assert results["a"] == results["b"] == results["c"] == undisturbed
    assert world.was_writer["c"] == [], "it computed nothing"


def test_a_newcomer_that_comes_after_the_end_is_not_needed(world, undisturbed):
    def after(job):
        if job.worker_id == "a":
            world.break_(0)
            world.agree(1, "a", "b", "c")
            world.start("c", 1)
            wait_for(lambda: "c" in world.results)

    world.agree(0, "a", "b")
    for worker in "ab":
        world.start(worker, after=after)
    results = world.join()
    assert results["a"] == results["b"] == undisturbed
    assert isinstance(results["c"], SystemExit)
    assert results["c"].code == 0


def wait_for(condition) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def make_job(scaler=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, Rows(), num_slots=2, slot_batch_size=4, scaler=scaler,
               run=RunOptions(progress=False), **options)  # fmt: skip


def compute(job, step):
    for micro in step:
        micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))


def test_gradients_are_unscaled_before_anybody_looks_at_them():
    plain, scaled = make_job(), make_job(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for one, other in zip(plain.steps(max_steps=4), scaled.steps(max_steps=4), strict=True):
        compute(plain, one)
        compute(scaled, other)
        assert one.unscale()
        assert other.reduce()
        assert torch.equal(scaled.model.weight.grad, plain.model.weight.grad * 1024.0)
        assert other.unscale()
        assert other.unscale(), "once is enough"
        assert torch.equal(scaled.model.weight.grad, plain.model.weight.grad)
        assert one.commit(max_grad_norm=0.1)
        assert other.commit(max_grad_norm=0.1)
    assert torch.equal(plain.model.weight, scaled.model.weight)
    plain.close()
    scaled.close()


def test_an_overflow_found_while_unscaling_leaves_the_update_out():
    job = make_job(torch.amp.GradScaler("cpu", init_scale=1e38), guard=Guard(nonfinite="stop"))
    before = job.model.weight.detach().clone()
    for step in job.steps(max_steps=1):
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs * 100), micro.targets) * 100)
        assert step.unscale()
        assert not job.model.weight.grad.isfinite().all()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        assert step.commit() is Outcome.APPLIED
    assert torch.equal(job.model.weight, before)
    assert job.scaler.get_scale() < 1e38
    job.close()


def test_what_the_loop_says_too_early_is_refused():
    job = make_job()
    with pytest.raises(ValueError, match="until_finish=True"):
        next(job.steps())
    steps = job.steps(until_finish=True)
    step = next(steps)
    with pytest.raises(RuntimeError, match=r"finish\(\) in step 0, which is not committed"):
        job.finish()
    with pytest.raises(RuntimeError, match=r"continue_at\(3\) after the job has begun"):
        job.continue_at(3)
    compute(job, step)
    step.commit()
    job.finish()
    assert list(steps) == []
    assert job.step == 1
    job.close()
    with pytest.raises(TypeError, match=r"loop_state\['loop'\] is a int without state_dict"):
        make_job(loop_state={"loop": 3})


def test_a_job_can_begin_where_the_loop_has_its_checkpoint():
    whole, later = make_job(), make_job()
    for step in whole.steps(max_steps=7):
        compute(whole, step)
        if step.commit() and step.number == 3:
            later.model.load_state_dict(whole.model.state_dict())
    later.continue_at(4)
    numbers = []
    for step in later.steps(max_steps=7):
        numbers.append(step.number)
        compute(later, step)
        step.commit()
    assert numbers == [4, 5, 6]
    assert later.digest() == whole.digest()
    whole.close()
    later.close()


def test_means_of_logs_are_by_weight_and_leave_out_what_has_none():
    logs = SlotLogs()
    logs.add(0, "x", 1.0, 3.0)
    logs.add(1, "x", 5.0, 1.0)
    logs.add(1, "x", float("nan"), 0.0)
    logs.add(1, "y", float("inf"), 1.0)
    assert logs.gather(None) == {"x": 2.0, "y": float("inf")}
    with pytest.raises(ValueError, match="'x' has weight -1"):
        logs.add(2, "x", 1.0, -1.0)


def test_the_writer_is_the_one_that_came_first():
    assert choose_writer(("c", "a", "b"), ([1, 0, 0], [0, 0, 1], [0, 0, 2])) == "a"
    assert choose_writer(("d", "c", "b"), ([2, 1, 0], [1, 0, 0], [1, 0, 1])) == "c"


def test_a_value_is_written_once(tmp_path):
    environment = {"PHALANX_STORE": f"file://{tmp_path}", "PHALANX_JOB": "j", "WORLD_SIZE": "2", "RANK": "1"}
    assert write_once("run", "first", environ=environment) == "first"
    assert write_once("run", "second", environ={**environment, "RANK": "0"}) == "first"
    assert write_once("other", "second", environ=environment) == "second"
    assert write_once("run", "third", environ={**environment, "PHALANX_JOB": "k"}) == "third"
